package stale

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// mostForgotten bounds what one Forget deletes: a full table takes seconds.
const mostForgotten = 50_000

// Forget deletes entries of connections whose packets conntrack sees no more, as unseen
// says of their two ends: an entry of TCP would stay for five days, since nobody sees
// the connection end. Of what is translated go those of which denied says so, by who
// answers whom: they were cut. What is in another zone is left alone. It returns how
// many it deleted, and whether there may be more.
func (r *Reconciler) Forget(ctx context.Context, unseen, denied func(p model.Protocol, from, to netip.AddrPort) bool) (deleted int, more bool, err error) {
	var failed error
	err = r.cfg.Table.Dump(ctx, conntrack.Filter{}, func(e *conntrack.Entry) bool {
		if deleted == mostForgotten {
			more = true
			return false
		}
		if !ours(e) {
			return true
		}
		p := model.Protocol(e.Protocol)
		if translated(e) && !denied(p, e.Reply.Src, e.Reply.Dst) || !translated(e) && !unseen(p, e.Orig.Src, e.Orig.Dst) {
			return true
		}
		if failed = r.cfg.Table.Delete(e); failed != nil {
			return false
		}
		deleted++
		return true
	})
	if err = errors.Join(err, failed); errors.Is(err, conntrack.ErrUnsupported) {
		return 0, false, nil
	}
	if err != nil {
		return deleted, false, fmt.Errorf("delete conntrack entries of untracked connections: %w", err)
	}
	return deleted, more, nil
}

// ours reports whether policies may be about an entry: of a protocol with ports, in no zone.
func ours(e *conntrack.Entry) bool {
	switch e.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
	default:
		return false
	}
	return e.Zone == 0 && e.Orig.Zone == 0 && e.Reply.Zone == 0
}

func translated(e *conntrack.Entry) bool {
	return e.Status&(conntrack.SrcNAT|conntrack.DstNAT) != 0 || e.Orig.Src != e.Reply.Dst || e.Orig.Dst != e.Reply.Src
}

// Translated gives both directions of each connection that somebody translates to keeps,
// as its packets come: before that. One may come twice. Of those of which it says so, what
// has ended and waits for its ports to be free again is deleted: a new connection of the
// same ports would be translated because of it. In another zone nothing is.
func (r *Reconciler) Translated(ctx context.Context, keeps func(p model.Protocol, from, to netip.AddrPort) bool) error {
	var failed error
	for _, status := range []conntrack.Status{conntrack.DstNAT, conntrack.SrcNAT} {
		err := r.cfg.Table.Dump(ctx, conntrack.Filter{Status: status}, func(e *conntrack.Entry) bool {
			asks := keeps(model.Protocol(e.Protocol), e.Orig.Src, e.Orig.Dst)
			answers := keeps(model.Protocol(e.Protocol), e.Reply.Src, e.Reply.Dst)
			ended := e.Protocol == unix.IPPROTO_TCP && (e.TCPState == tcpTimeWait || e.TCPState == tcpClose)
			if ended && ours(e) && (asks || answers) {
				failed = r.cfg.Table.Delete(e)
			}
			return failed == nil
		})
		if errors.Is(err, conntrack.ErrUnsupported) {
			return nil
		}
		if err = errors.Join(err, failed); err != nil {
			return fmt.Errorf("look for connections that somebody translates: %w", err)
		}
	}
	return nil
}

// enum tcp_conntrack of include/uapi/linux/netfilter/nf_conntrack_tcp.h.
const tcpTimeWait, tcpClose = 7, 8
