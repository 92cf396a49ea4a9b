// Package conntrack sees the kernel's connection tracking of one network
// namespace: its entries, counters, expectations, sizes and time-outs, over
// netlink (ctnetlink) and /proc/sys. It knows nothing of Services; what of them
// is out of date in the table is the business of conntrack/stale.
//
//	Open / Namespace.Do ──> Conn ──> Dump      entries, one at a time
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

// ErrUnsupported says that the kernel has no conntrack that netlink could ask:
// no nf_conntrack, or no nf_conntrack_netlink.
var ErrUnsupported = errors.New("this kernel has no conntrack over netlink: load the module nf_conntrack_netlink")

// Messages of ctnetlink, from include/uapi/linux/netfilter/nfnetlink_conntrack.h.
const (
	msgGet         = 1
	msgDelete      = 2
	msgGetStatsCPU = 4
	msgGetStats    = 5
	msgExpectGet   = 1
)

// dumpTries bounds how often a dump is begun again that the kernel broke off.
const dumpTries = 5

// Conn is a pair of netlink sockets in one network namespace. It is not safe
// for use by several goroutines at once, but any thread may use it: a socket
// stays in the namespace that it was opened in.
type Conn struct {
	dump *dumpSocket      // dumps; busy while one is under way
	ask  *nl.SocketHandle // all else, also in the middle of a dump
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
	// The kernel answers at once; this is for one that never does.
	if err := errors.Join(s.SetSendTimeout(&nl.SocketTimeoutTv), s.SetReceiveTimeout(&nl.SocketTimeoutTv)); err != nil {
		s.Close()
		return nil, fmt.Errorf("set time-outs of netlink socket: %w", err)
	}
	return &nl.SocketHandle{Socket: s}, nil
}

// Close closes the sockets.
func (c *Conn) Close() {
	c.dump.close()
	c.ask.Close()
}

// request makes a message for one of the subsystems of nfnetlink.
func (c *Conn) request(subsystem, message, flags int, family uint8) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(subsystem<<8|message, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: c.ask}
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	return req
}

// dumpAll sends a dump request and gives each answer's bytes to each, until
// each returns false; it must not keep them.
func (c *Conn) dumpAll(subsystem, message int, family uint8, attrs []*nl.RtAttr, each func([]byte) bool) error {
	req := c.request(subsystem, message, unix.NLM_F_DUMP, family)
	for _, a := range attrs {
		req.AddData(a)
	}
	return meaning(c.dump.run(req, each))
}

// dumpAgain repeats a dump that the kernel did not finish: begin is called
// before each try.
func dumpAgain(ctx context.Context, dump func() error) error {
	var err error
	for range dumpTries {
		if err = ctx.Err(); err != nil {
			return err
		}
		if err = dump(); !brokenOff(err) {
			return err
		}
	}
	return fmt.Errorf("broken off %d times: %w", dumpTries, err)
}

// brokenOff tells a dump that has only to be repeated: the table changed under
// it (EINTR, which nl.ErrDumpInterrupted is too) or the socket's buffer was too
// small for a moment (ENOBUFS).
func brokenOff(err error) bool {
	return errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOBUFS)
}

// meaning turns what nfnetlink answers when a subsystem is missing into
// ErrUnsupported. It asks for the module first, so EINVAL is its last word.
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
