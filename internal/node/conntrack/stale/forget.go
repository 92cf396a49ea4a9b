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

// maxDeletes bounds the entries that one Forget deletes: a full table takes seconds.
const maxDeletes = 50_000

// Forget deletes untranslated entries for which untracked(src, dst) is true, and
// translated entries for which denied(replySrc, replyDst) is true. Conntrack no longer
// sees packets of an untracked connection, so that a TCP entry would stay for five days.
// Entries in other zones stay. Forget returns the number of deleted entries, and whether
// there may be more.
func (r *Reconciler) Forget(ctx context.Context, untracked,
	denied func(p model.Protocol, from, to netip.AddrPort) bool) (deleted int, more bool, err error) {
	var failed error
	err = r.cfg.Table.Dump(ctx, conntrack.Filter{}, func(e *conntrack.Entry) bool {
		if deleted == maxDeletes {
			more = true
			return false
		}
		if !inScope(e) {
			return true
		}
		p := model.Protocol(e.Protocol)
		if translated(e) && !denied(p, e.Reply.Src, e.Reply.Dst) || !translated(e) && !untracked(p, e.Orig.Src, e.Orig.Dst) {
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

// inScope reports whether policies may apply to an entry: its protocol has ports, and it
// is in zone 0.
func inScope(e *conntrack.Entry) bool {
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

// Translated calls keeps with both directions of each connection that netfilter
// translates: source and destination before the translation. It may report a connection
// twice. If keeps returns true for an ended TCP connection in zone 0, Translated deletes
// the entry. Otherwise a new connection with the same ports would be translated too.
func (r *Reconciler) Translated(ctx context.Context, keeps func(p model.Protocol, from, to netip.AddrPort) bool) error {
	var failed error
	for _, status := range []conntrack.Status{conntrack.DstNAT, conntrack.SrcNAT} {
		err := r.cfg.Table.Dump(ctx, conntrack.Filter{Status: status}, func(e *conntrack.Entry) bool {
			original := keeps(model.Protocol(e.Protocol), e.Orig.Src, e.Orig.Dst)
			reply := keeps(model.Protocol(e.Protocol), e.Reply.Src, e.Reply.Dst)
			ended := e.Protocol == unix.IPPROTO_TCP && (e.TCPState == tcpTimeWait || e.TCPState == tcpClose)
			if ended && inScope(e) && (original || reply) {
				failed = r.cfg.Table.Delete(e)
			}
			return failed == nil
		})
		if errors.Is(err, conntrack.ErrUnsupported) {
			return nil
		}
		if err = errors.Join(err, failed); err != nil {
			return fmt.Errorf("list translated connections: %w", err)
		}
	}
	return nil
}

// enum tcp_conntrack of include/uapi/linux/netfilter/nf_conntrack_tcp.h.
const tcpTimeWait, tcpClose = 7, 8
