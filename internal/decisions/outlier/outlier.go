// Package outlier decides which endpoints get no new connections for a while, because they
// do not accept them. It reads what the dataplane has seen of TCP handshakes.
//
// A handshake without an answer proves nothing about the endpoint: any host can send a SYN that
// the endpoint's kernel or a NetworkPolicy drops, in the name of any client. So an endpoint is
// ejected only after it has not accepted a connection of the agent either: a Check.
package outlier

import (
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
)

const (
	// ejectAfter is the number of consecutive handshakes that fail before an endpoint is
	// checked.
	ejectAfter = 5
	// ejectAgainAfter is that number for an endpoint that was ejected before and has
	// accepted no connection since.
	ejectAgainAfter = 2
	// silence is how long handshakes must be without an answer. An RST needs no wait.
	silence = 500 * time.Millisecond
	// longSilence is how long an endpoint that does not answer the agent must accept no
	// connection, because its check proves nothing.
	longSilence = 5 * time.Second
	// checkAgainAfter is the time between a check and the next one of an endpoint that
	// fails, and reachAgainAfter of one that accepts the connections of clients alone.
	checkAgainAfter = time.Second
	reachAgainAfter = time.Minute
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

// Check is an endpoint that the agent must connect to. Either its handshakes fail, or it accepts
// connections and the agent does not know whether it would accept one of its own.
type Check struct {
	ID       uint32
	Port     intent.PortID
	Endpoint netip.AddrPort
}

// Answer is how an endpoint has answered a check.
type Answer int

// The answers. Unknown: the agent could not connect, for a reason of its own.
const (
	Unknown Answer = iota
	Accepted
	Failed // refused, or not at all
)

// Result is the answer to a Check.
type Result struct {
	Check
	Answer Answer
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

// endpoint is one that is watched.
type endpoint struct {
	Ejection
	port    intent.PortID
	ejected bool
	times   int // ejections in a row
	last    Outcome
	// Handshakes that failed before since do not count: it got connections again, or has
	// accepted the agent's.
	since           time.Time
	failed, refused uint32

	suspect     bool      // enough handshakes have failed
	checked     time.Time // the last result; zero: none
	answered    bool      // that result was Accepted
	confirmed   bool      // a suspect that has not accepted the agent's connection
	checkFailed bool      // it has not accepted the agent, without being a suspect
	unreachable bool      // it has accepted a client's connection after that
}

// Observe takes the results of checks and the outcomes of all watched endpoints. It reports
// whether Ejections has changed. An endpoint that is missing has left the Service.
func (d *Detector) Observe(now time.Time, outcomes []Outcome, results []Result) (changed bool) {
	for _, r := range results {
		if e := d.endpoints[key{r.Port, r.ID}]; e != nil {
			e.result(now, r.Answer)
		}
	}
	next := make(map[key]*endpoint, len(d.endpoints))
	for i := range outcomes {
		o := &outcomes[i]
		k := key{o.Port, o.ID}
		e := d.endpoints[k]
		if e == nil {
			e = &endpoint{port: o.Port, Ejection: Ejection{Endpoint: o.Endpoint}}
		}
		changed = e.observe(now, o) || changed
		next[k] = e
	}
	for k, e := range d.endpoints {
		changed = changed || e.ejected && next[k] == nil
	}
	d.endpoints = next
	return changed
}

// result takes the answer to a check. A connection that the endpoint has accepted counts like a
// client's.
func (e *endpoint) result(now time.Time, a Answer) {
	e.checked, e.answered = now, a == Accepted
	switch {
	case e.answered:
		e.checkFailed, e.unreachable = false, false
		e.restart(now)
	case a == Failed && e.suspect:
		e.confirmed = true
	case a == Failed && !e.ejected:
		e.checkFailed = true
	}
}

// restart begins to count anew.
func (e *endpoint) restart(now time.Time) {
	e.since, e.failed, e.refused = now, e.last.Failed, e.last.Refused
	e.suspect, e.confirmed = false, false
}

// observe reports whether the endpoint begins or stops being ejected.
func (e *endpoint) observe(now time.Time, o *Outcome) bool {
	e.last = *o
	if e.ejected {
		if now.Before(e.Until) {
			return false
		}
		e.ejected = false
		e.restart(e.Until)
		return true
	}
	if o.Failed < e.failed || o.Accepted.After(e.since) {
		e.failed, e.refused = 0, 0
	}
	if e.checkFailed && o.Accepted.After(e.checked) {
		e.checkFailed, e.unreachable = false, true
	}
	why, since := e.verdict(now, o)
	e.suspect = why != ""
	e.confirmed = e.confirmed && e.suspect
	if e.confirmed && (!e.unreachable || now.Sub(since) >= longSilence) {
		e.eject(now, why)
		return true
	}
	if now.Sub(e.Until) > lastBackOff {
		e.times = 0
	}
	return false
}

// verdict returns why the endpoint seems to fail, and since when; "": it does not.
func (e *endpoint) verdict(now time.Time, o *Outcome) (why string, since time.Time) {
	need := uint32(ejectAfter)
	if e.times > 0 && !o.Accepted.After(e.Until) && !e.since.After(e.Until) {
		need = ejectAgainAfter
	}
	since = o.Since
	if since.Before(e.since) {
		since = e.since
	}
	switch failed, refused := o.Failed-min(e.failed, o.Failed), o.Refused-min(e.refused, o.Refused); {
	case refused >= need:
		why = "it refused its last connections"
	case failed >= need && now.Sub(since) >= silence:
		why = "it did not answer its last connections"
	}
	return why, since
}

func (e *endpoint) eject(now time.Time, why string) {
	backOff := firstBackOff << min(e.times, 10)
	e.ejected, e.At, e.Until, e.Why = true, now, now.Add(min(backOff, lastBackOff)), why
	e.suspect, e.confirmed, e.checkFailed = false, false, false
	e.times++
}

// Checks returns the endpoints that the agent must connect to now, those that fail in front. An
// endpoint stays until Observe has its result.
func (d *Detector) Checks(now time.Time) []Check {
	var suspects, others []Check
	for k, e := range d.endpoints {
		c := Check{ID: k.id, Port: k.port, Endpoint: e.Endpoint}
		switch {
		case e.ejected || e.confirmed:
		case e.suspect && now.Sub(e.checked) >= checkAgainAfter:
			suspects = append(suspects, c)
		case !e.answered && e.last.Accepted.After(e.checked) && now.Sub(e.checked) >= reachAgainAfter:
			others = append(others, c)
		}
	}
	return append(suspects, others...)
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
