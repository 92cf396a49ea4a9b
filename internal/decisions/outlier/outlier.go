// Package outlier decides which endpoints get no new connections for a while, because they
// do not accept them. It reads what the dataplane has seen of TCP handshakes, and sends no
// packet of its own.
package outlier

import (
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
)

const (
	// ejectAfter is the number of consecutive handshakes that fail before an endpoint is
	// ejected.
	ejectAfter = 5
	// ejectAgainAfter is that number for an endpoint that was ejected before and has
	// accepted no connection since.
	ejectAgainAfter = 2
	// silence is how long handshakes must be without an answer. An RST needs no wait.
	silence = 500 * time.Millisecond
	// firstBackOff is the time of the first ejection. Each further one takes twice as long,
	// up to lastBackOff. An endpoint that works for lastBackOff begins again.
	firstBackOff = 10 * time.Second
	lastBackOff  = 5 * time.Minute
)

// Outcome is what the dataplane has seen of an endpoint's handshakes since the last one that
// it accepted.
type Outcome struct {
	ID       uint32 // never used for another endpoint of the port
	Port     intent.PortID
	Endpoint netip.AddrPort
	// Failed is the number of handshakes without an accepted connection; Refused is how many
	// of them the endpoint answered with an RST.
	Failed, Refused uint32
	Since           time.Time // of the first of them; zero: there is none
	Accepted        time.Time // the last connection; zero: none yet
}

// Ejection is an endpoint that gets no new connections.
type Ejection struct {
	Endpoint netip.AddrPort
	At       time.Time // when it was ejected
	Until    time.Time // when it may get connections again
	Why      string    // such as "5 connections in a row were refused"
}

// Detector keeps the state of endpoints between two looks at their outcomes.
type Detector struct {
	endpoints map[key]*endpoint
}

// key names an endpoint: two dataplanes, which serve different ports, may give one ID twice.
type key struct {
	port intent.PortID
	id   uint32
}

// endpoint is one that was ejected at least once.
type endpoint struct {
	Ejection
	port    intent.PortID
	ejected bool
	times   int // ejections in a row
	// Handshakes that had failed when it got connections again.
	failed, refused uint32
}

// Observe takes the outcomes of all watched endpoints, and reports whether Ejections has
// changed. An endpoint that is missing has left the Service.
func (d *Detector) Observe(now time.Time, outcomes []Outcome) (changed bool) {
	next := make(map[key]*endpoint, len(d.endpoints))
	for i := range outcomes {
		o := &outcomes[i]
		k := key{o.Port, o.ID}
		e := d.endpoints[k]
		if e == nil {
			e = &endpoint{port: o.Port, Ejection: Ejection{Endpoint: o.Endpoint}}
		}
		changed = e.observe(now, o) || changed
		if e.times > 0 {
			next[k] = e
		}
	}
	for k, e := range d.endpoints {
		changed = changed || e.ejected && next[k] == nil
	}
	d.endpoints = next
	return changed
}

// observe reports whether the endpoint begins or stops being ejected.
func (e *endpoint) observe(now time.Time, o *Outcome) bool {
	if e.ejected {
		if now.Before(e.Until) {
			return false
		}
		e.ejected, e.failed, e.refused = false, o.Failed, o.Refused
		return true
	}
	if o.Failed < e.failed || o.Accepted.After(e.Until) {
		e.failed, e.refused = 0, 0
	}
	if why := e.verdict(now, o); why != "" {
		e.eject(now, why)
		return true
	}
	if now.Sub(e.Until) > lastBackOff {
		e.times = 0
	}
	return false
}

// verdict returns why the endpoint must be ejected; "": it need not.
func (e *endpoint) verdict(now time.Time, o *Outcome) string {
	need := uint32(ejectAfter)
	if e.times > 0 && !o.Accepted.After(e.Until) {
		need = ejectAgainAfter
	}
	since := o.Since
	if since.Before(e.Until) {
		since = e.Until
	}
	switch failed, refused := o.Failed-min(e.failed, o.Failed), o.Refused-min(e.refused, o.Refused); {
	case refused >= need:
		return "it refused its last connections"
	case failed >= need && now.Sub(since) >= silence:
		return "it did not answer its last connections"
	}
	return ""
}

func (e *endpoint) eject(now time.Time, why string) {
	backOff := firstBackOff << min(e.times, 10)
	e.ejected, e.At, e.Until, e.Why = true, now, now.Add(min(backOff, lastBackOff)), why
	e.times++
}

// Ejections returns the ejected endpoints by port, those ejected first in front.
func (d *Detector) Ejections() map[intent.PortID][]Ejection {
	out := map[intent.PortID][]Ejection{}
	for _, e := range d.endpoints {
		if e.ejected {
			out[e.port] = append(out[e.port], e.Ejection)
		}
	}
	for _, list := range out {
		slices.SortFunc(list, func(a, b Ejection) int {
			if c := a.At.Compare(b.At); c != 0 {
				return c
			}
			return a.Endpoint.Compare(b.Endpoint)
		})
	}
	return out
}
