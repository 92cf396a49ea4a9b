package upgrade

import (
	"errors"
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// reservedFor is the timeout of a reservation. Drained renews those that have expired.
const reservedFor = 5 * time.Minute

// tcpEstablished is TCP_CONNTRACK_ESTABLISHED of
// include/uapi/linux/netfilter/nf_conntrack_tcp.h.
const tcpEstablished = 3

// reservations keep the reply tuples of the established TCP connections from netfilter, which
// translates for other clients' connections, or for other addresses of a Service, meanwhile. A
// client may use one port for two of them. With the same endpoint, the second would get the
// first one's tuple: the endpoint would answer its SYN as part of the first, and these programs
// would translate the answer back to the first one's address. For a tuple that conntrack has,
// nf_nat takes another source port (nf_nat_used_tuple in net/netfilter/nf_nat_core.c).
//
// The endpoint's packets are the entry's original direction: a program that asks whether
// netfilter translates these replies must not find it (conntrack_sees_as_reply).
type reservations struct {
	table *conntrack.Conn // nil: the kernel has no conntrack
	room  int             // for more entries: the other half of the table is for new connections
	err   error           // the first one; nothing is tried after it
}

func openReservations() *reservations {
	r := &reservations{}
	if r.table, r.err = conntrack.Open(); errors.Is(r.err, conntrack.ErrUnsupported) {
		r.err = nil
	}
	if r.table != nil {
		r.room, r.err = conntrackRoom()
	}
	return r
}

func (r *reservations) close() {
	if r.table != nil {
		r.table.Close()
	}
}

// add reserves the tuple of a reply. A handshake is reserved when it is over: a flood of forged
// SYNs gets no entry.
func (r *reservations) add(k *objects.TCTuple, f *objects.TCFlow) {
	if r.table == nil || r.room <= 0 || r.err != nil || objects.TCFlowState(f.State) < objects.TCFlowStateFLOW_ESTABLISHED {
		return
	}
	added, err := r.table.Add(reservation(k))
	if added {
		r.room--
	}
	r.err = err
}

// conntrackRoom is how many entries may be added: with them, the table is half full at most.
func conntrackRoom() (int, error) {
	used, err := conntrack.ReadCount()
	if errors.Is(err, conntrack.ErrUnsupported) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	limits, err := conntrack.ReadLimits()
	if err != nil {
		return 0, err
	}
	return limits.Max/2 - used, nil
}

// reservation is the entry of a reply tuple.
func reservation(k *objects.TCTuple) *conntrack.Entry {
	from := netip.AddrPortFrom(objects.FromAddr(k.Saddr, k.Family), objects.ToPort(k.Sport))
	to := netip.AddrPortFrom(objects.FromAddr(k.Daddr, k.Family), objects.ToPort(k.Dport))
	return &conntrack.Entry{
		Protocol: uint8(model.TCP), TCPState: tcpEstablished, Timeout: reservedFor,
		Status: conntrack.SeenReply | conntrack.Assured,
		Orig:   conntrack.Tuple{Src: from, Dst: to}, Reply: conntrack.Tuple{Src: to, Dst: from},
	}
}
