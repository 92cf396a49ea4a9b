package stale

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// handshakePause is the shortest time between two scans for handshakes, however many ports change.
// scanShare bounds the scans' part of the time on a node with a large table: a tenth.
const (
	handshakePause = time.Second
	scanShare      = 9
)

// handshakes are the TCP Service ports whose connections may be in a handshake with a removed
// endpoint. Netfilter would lead each repetition of the client's SYN there. Without the entry, the
// next SYN gets a present endpoint. An answered handshake, and so every connection, keeps its entry.
type handshakes struct {
	ports map[intent.PortID]*intent.ServicePort // TCP
	// lost has the ports that lost an endpoint since the last scan. again has those of the last
	// scan: a packet that was traversing the old rules creates its entry after it. Both have the
	// frontends that a port had then: the entries of one that it got later may be of another port,
	// whose endpoint serves.
	lost, again map[intent.PortID][]frontend
	next        time.Time // no scan before
}

func newHandshakes() handshakes {
	return handshakes{
		ports: map[intent.PortID]*intent.ServicePort{},
		lost:  map[intent.PortID][]frontend{}, again: map[intent.PortID][]frontend{},
	}
}

func (h *handshakes) remove(id intent.PortID) {
	delete(h.ports, id)
	delete(h.lost, id)
	delete(h.again, id)
}

func (h *handshakes) upsert(p *intent.ServicePort) {
	old := h.ports[p.ID]
	if old == p {
		return
	}
	switch {
	case old == nil:
		h.lost[p.ID] = frontendsOf(p)
	case lostEndpoint(old, p):
		h.lost[p.ID] = append(h.lost[p.ID], frontendsOf(old)...)
	}
	if had, pending := h.lost[p.ID]; pending {
		h.lost[p.ID] = common(had, frontendsOf(p))
	}
	h.ports[p.ID] = p
}

// checks returns the frontends to check, with their ports.
func (h *handshakes) checks() map[frontend]*intent.ServicePort {
	checks := map[frontend]*intent.ServicePort{}
	for _, ports := range []map[intent.PortID][]frontend{h.lost, h.again} {
		for id, had := range ports {
			for _, f := range common(had, frontendsOf(h.ports[id])) {
				checks[f] = h.ports[id]
			}
		}
	}
	return checks
}

// common returns the frontends of now that are also in had.
func common(had, now []frontend) (out []frontend) {
	for _, f := range now {
		if slices.Contains(had, f) {
			out = append(out, f)
		}
	}
	return out
}

func (h *handshakes) pending() bool { return len(h.lost)+len(h.again) > 0 }

// recheck returns when to scan; zero: not again.
func (h *handshakes) recheck() time.Time {
	if !h.pending() {
		return time.Time{}
	}
	return h.next
}

// scanHandshakes deletes the entries of unanswered handshakes with removed endpoints, if a scan is
// due. After an error it will be due again.
func (r *Reconciler) scanHandshakes(ctx context.Context) error {
	h := &r.handshakes
	began := r.now()
	if !h.pending() || h.next.After(began) {
		return nil
	}
	l, checks := scan{r: r, serving: servingSets{}}, h.checks()
	unanswered := conntrack.Filter{Protocol: unix.IPPROTO_TCP, Status: conntrack.DstNAT, Unset: conntrack.SeenReply}
	var err error
	for _, f := range ofFamilies(unanswered, checks) {
		err = errors.Join(err, r.cfg.Table.Dump(ctx, f, func(e *conntrack.Entry) bool {
			if l.lostHandshake(e, checks) {
				l.delete(e)
			}
			return true
		}))
	}
	ended := r.now()
	h.next = ended.Add(max(handshakePause, scanShare*ended.Sub(began)))
	if err != nil {
		return err
	}
	if l.err != nil {
		return l.err
	}
	h.again, h.lost = h.lost, map[intent.PortID][]frontend{}
	return nil
}

// lostHandshake reports whether an entry is that of an unanswered SYN to an endpoint that no longer
// serves the port of its frontend.
func (l *scan) lostHandshake(e *conntrack.Entry, checks map[frontend]*intent.ServicePort) bool {
	if !inScope(e) || e.Protocol != unix.IPPROTO_TCP || e.Status&(conntrack.DstNAT|conntrack.SeenReply) != conntrack.DstNAT {
		return false
	}
	f := frontend{addr: e.Orig.Dst.Addr(), family: model.FamilyOf(e.Orig.Dst.Addr()), port: e.Orig.Dst.Port()}
	p := checks[f]
	if _, isNodeAddr := l.r.nodeAddrs[f.addr]; p == nil && isNodeAddr {
		p = checks[frontend{family: f.family, port: f.port}]
	}
	return p != nil && !l.serves(p, e.Reply.Src)
}
