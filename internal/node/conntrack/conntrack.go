// Package conntrack reads the kernel's connection tracking of one network namespace:
// its entries, counters, expectations, sizes and timeouts, over netlink (ctnetlink) and
// /proc/sys. It knows nothing of Services; package conntrack/stale deletes their stale
// entries.
//
//	Open / Namespace.Do ──> Conn ──> Dump      entries, one at a time
//	                             ├─> Add       one entry, if there is none
//	                             ├─> Delete    one entry, and no other
//	                             ├─> Stats     per-CPU counters, size
//	                             └─> Expectations
package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrUnsupported reports that the kernel has no conntrack over netlink: nf_conntrack or
// nf_conntrack_netlink is missing.
var ErrUnsupported = errors.New("this kernel has no conntrack over netlink: load the module nf_conntrack_netlink")

// Messages of ctnetlink, from include/uapi/linux/netfilter/nfnetlink_conntrack.h.
const (
	msgNew         = 0
	msgGet         = 1
	msgDelete      = 2
	msgGetStatsCPU = 4
	msgGetStats    = 5
	msgExpectGet   = 1
)

// dumpTries bounds the restarts of a dump that the kernel interrupts.
const dumpTries = 5

// Conn is a pair of netlink sockets in one network namespace. It is not safe for use by
// several goroutines at once. Any thread may use it: a socket stays in the namespace that
// it was opened in.
type Conn struct {
	dump *dumpSocket      // for dumps; busy during a dump
	ask  *nl.SocketHandle // for all other requests, also during a dump
}

// Open opens a Conn in the network namespace of the calling thread. Sockets
// keep their namespace alive: Close when done.
func Open() (*Conn, error) {
	ask, err := openSocket()
	if err != nil {
		return nil, err
	}
	dump, err := openDump()
	if err != nil {
		ask.Close()
		return nil, fmt.Errorf("open netfilter netlink socket: %w", err)
	}
	return &Conn{dump: dump, ask: ask}, nil
}

func openSocket() (*nl.SocketHandle, error) {
	s, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, ErrUnsupported
	}
	if err != nil {
		return nil, fmt.Errorf("open netfilter netlink socket: %w", err)
	}
	// The kernel replies at once; the timeout is a safeguard.
	if err := errors.Join(s.SetSendTimeout(&nl.SocketTimeoutTv), s.SetReceiveTimeout(&nl.SocketTimeoutTv)); err != nil {
		s.Close()
		return nil, fmt.Errorf("set timeouts of netlink socket: %w", err)
	}
	return &nl.SocketHandle{Socket: s}, nil
}

// Close closes the sockets.
func (c *Conn) Close() {
	c.dump.close()
	c.ask.Close()
}

// request makes a message to a subsystem of nfnetlink.
func (c *Conn) request(subsystem, message, flags int, family uint8) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(subsystem<<8|message, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: c.ask}
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return req
}

// dumpAll sends a dump request and calls each with the bytes of each reply, until each
// returns false. each must not keep them.
func (c *Conn) dumpAll(subsystem, message int, family uint8, attrs []*nl.RtAttr, each func([]byte) bool) error {
	req := c.request(subsystem, message, unix.NLM_F_DUMP, family)
	for _, a := range attrs {
		req.AddData(a)
	}
	return meaning(c.dump.run(req, each))
}

// dumpAgain repeats a dump that the kernel did not finish. It calls begin before each
// attempt.
func dumpAgain(ctx context.Context, dump func() error) error {
	var err error
	for range dumpTries {
		if err = ctx.Err(); err != nil {
			return err
		}
		if err = dump(); !interrupted(err) {
			return err
		}
	}
	return fmt.Errorf("interrupted %d times: %w", dumpTries, err)
}

// interrupted reports whether a dump only has to be repeated: the table changed during
// it (EINTR, which includes nl.ErrDumpInterrupted), or the socket's buffer overflowed
// (ENOBUFS).
func interrupted(err error) bool {
	return errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOBUFS)
}

// meaning converts nfnetlink's error for a missing subsystem into ErrUnsupported.
// nfnetlink tries to load the module first, so EINVAL is final.
func meaning(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return ErrUnsupported
	}
	return err
}

func be16(b []byte) uint16 {
	if len(b) < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(b)
}

func be32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}
