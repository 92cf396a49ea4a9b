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
	// lost has what changed since the last scan. again has that of the last scan: a packet that was
	// traversing the old rules creates its entry after it.
	lost, again losses
	next        time.Time // no scan before
}

// losses are the frontends whose unanswered handshakes may lead to a removed endpoint.
type losses struct {
	// endpoints has the ports that lost an endpoint, with the frontends that they had then: the entries
	// of one that a port got later may be of another port, whose endpoint serves.
	endpoints map[intent.PortID][]frontend
	// deleted has the frontends of deleted ports.
	deleted map[frontend]*intent.ServicePort
}

func newLosses() losses {
	return losses{endpoints: map[intent.PortID][]frontend{}, deleted: map[frontend]*intent.ServicePort{}}
}

func (l losses) any() bool { return len(l.endpoints)+len(l.deleted) > 0 }

func newHandshakes() handshakes {
	return handshakes{ports: map[intent.PortID]*intent.ServicePort{}, lost: newLosses(), again: newLosses()}
}

func (h *handshakes) remove(id intent.PortID) {
	p := h.ports[id]
	if p == nil {
		return
	}
	delete(h.ports, id)
	delete(h.lost.endpoints, id)
	delete(h.again.endpoints, id)
	for _, f := range frontendsOf(p) {
		h.lost.deleted[f] = p
	}
}

func (h *handshakes) upsert(p *intent.ServicePort) {
	old := h.ports[p.ID]
	if old == p {
		return
	}
	lost := h.lost.endpoints
	switch {
	case old == nil:
		lost[p.ID] = frontendsOf(p)
	case lostEndpoint(old, p):
		lost[p.ID] = append(lost[p.ID], frontendsOf(old)...)
	}
	if had, pending := lost[p.ID]; pending {
		lost[p.ID] = common(had, frontendsOf(p))
	}
	h.ports[p.ID] = p
}

// handshakeCheck is how to judge the handshakes of a frontend.
type handshakeCheck struct {
	port    *intent.ServicePort
	deleted bool // no port has the frontend: this one had it
}

// checks returns the frontends to check.
func (h *handshakes) checks() map[frontend]handshakeCheck {
	checks := map[frontend]handshakeCheck{}
	for _, l := range []losses{h.again, h.lost} {
		for f, p := range l.deleted {
			checks[f] = handshakeCheck{p, true}
		}
	}
	if len(checks) > 0 {
		for _, p := range h.ports {
			for _, f := range frontendsOf(p) {
				if _, had := checks[f]; had {
					checks[f] = handshakeCheck{port: p}
				}
			}
		}
	}
	for _, l := range []losses{h.again, h.lost} {
		for id, had := range l.endpoints {
			for _, f := range common(had, frontendsOf(h.ports[id])) {
				checks[f] = handshakeCheck{port: h.ports[id]}
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

func (h *handshakes) pending() bool { return h.lost.any() || h.again.any() }

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
	h.again, h.lost = h.lost, newLosses()
	return nil
}

// lostHandshake reports whether an entry is that of an unanswered SYN to an endpoint that no longer
// serves the port of its frontend.
func (l *scan) lostHandshake(e *conntrack.Entry, checks map[frontend]handshakeCheck) bool {
	if !inScope(e) || e.Protocol != unix.IPPROTO_TCP || e.Status&(conntrack.DstNAT|conntrack.SeenReply) != conntrack.DstNAT {
		return false
	}
	f := frontend{addr: e.Orig.Dst.Addr(), family: model.FamilyOf(e.Orig.Dst.Addr()), port: e.Orig.Dst.Port()}
	c, known := checks[f]
	if _, isNodeAddr := l.r.nodeAddrs[f.addr]; !known && isNodeAddr {
		c, known = checks[frontend{family: f.family, port: f.port}]
	}
	// An entry of a deleted port that leads elsewhere is another program's.
	return known && l.serves(c.port, e.Reply.Src) == c.deleted
}
