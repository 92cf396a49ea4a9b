package drops

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Of sock_diag, from include/uapi/linux/inet_diag.h and sock_diag.h.
const (
	sockDiagByFamily = 20
	stateListen      = 10
)

// socket is a TCP socket. A listener's queue holds connections that the program has not
// accepted. The kernel accepts one more than most.
type socket struct {
	listens     bool
	queue, most uint32
}

// diagRequest is struct inet_diag_req_v2.
type diagRequest [56]byte

func (d *diagRequest) Len() int          { return len(d) }
func (d *diagRequest) Serialize() []byte { return d[:] }

// findSocket finds the socket of a namespace for a packet: the connection's or, if there
// is none, the listener.
func findSocket(n place, from, to netip.AddrPort) (s socket, err error) {
	family := uint8(unix.AF_INET)
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	body := &diagRequest{family, unix.IPPROTO_TCP}
	binary.NativeEndian.PutUint32(body[4:], ^uint32(0)) // any state
	binary.BigEndian.PutUint16(body[8:], to.Port())
	binary.BigEndian.PutUint16(body[10:], from.Port())
	copy(body[12:28], to.Addr().AsSlice())
	copy(body[28:44], from.Addr().AsSlice())
	binary.NativeEndian.PutUint64(body[48:], ^uint64(0)) // no cookie
	err = n.enter(func() error {
		req := nl.NewNetlinkRequest(sockDiagByFamily, unix.NLM_F_ACK)
		req.AddData(body)
		answers, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
		if err != nil {
			return fmt.Errorf("find socket: %w", err)
		}
		// A struct inet_diag_msg.
		if len(answers) == 0 || len(answers[0]) < 72 {
			return errors.New("find socket: no answer")
		}
		b := answers[0]
		s = socket{b[1] == stateListen, binary.NativeEndian.Uint32(b[56:]), binary.NativeEndian.Uint32(b[60:])}
		return nil
	})
	return s, err
}
