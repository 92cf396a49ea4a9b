package intent

import (
	"fmt"
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// SlowStartAnnotation is the time in which the share of an endpoint that becomes ready grows
// to that of the others, such as 30s. Without it an endpoint has its whole share at once.
const SlowStartAnnotation = "spillway.dev/slow-start"

const (
	minSlowStart = time.Second
	maxSlowStart = 15 * time.Minute
	// slowStartSteps is the number of steps of a share: it begins with a tenth.
	slowStartSteps = 10
)

// slowStartOf reads SlowStartAnnotation; 0 without one.
func slowStartOf(svc *model.Service, complain func(field, what string)) time.Duration {
	text, set := svc.Annotations[SlowStartAnnotation]
	if !set {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < minSlowStart || d > maxSlowStart {
		complain(annotationField(SlowStartAnnotation), fmt.Sprintf("%q is not a time from %s to %s, such as 30s, and is left out",
			text, minSlowStart, maxSlowStart))
		return 0
	}
	return d
}

// starts has the endpoints of a Service with slow start, and when each became ready. The zero
// time is that of an endpoint that was ready before.
type starts map[PortID]map[netip.AddrPort]time.Time

// readySince records which candidates of a port are ready now. before has those of the
// decision before; the endpoints of a port that is new have their whole share at once.
func (s starts) readySince(id PortID, before starts, cs []candidate, now time.Time) {
	was, known := before[id]
	at := make(map[netip.AddrPort]time.Time, len(cs))
	for i := range cs {
		c := &cs[i]
		if !c.isReady() {
			continue
		}
		since, same := was[c.addr]
		if known && !same {
			since = now
		}
		at[c.addr] = since
	}
	s[id] = at
}

// shareStep returns how many of slowStartSteps an endpoint has, and when it gets one more;
// the zero time: it has all.
func shareStep(since, now time.Time, ramp time.Duration) (step int, next time.Time) {
	passed := now.Sub(since)
	if since.IsZero() || now.IsZero() || passed >= ramp {
		return slowStartSteps, time.Time{}
	}
	const left = slowStartSteps - 1
	step = 1 + int(passed*left/ramp)
	return step, since.Add((ramp*time.Duration(step) + left - 1) / left)
}

// ramp multiplies the weights of the candidates that some policy uses by their steps.
func (t *Tracker) ramp(e *service, id PortID, cs []candidate, ws []uint16) {
	i := 0
	for k := range cs {
		c := &cs[k]
		if !c.clusterPolicy && !c.localPolicy {
			continue
		}
		step, next := shareStep(e.starts[id][c.addr], t.now, e.plan.slowStart)
		ws[i] *= uint16(step)
		if !next.IsZero() && (t.nextStep.IsZero() || next.Before(t.nextStep)) {
			t.nextStep = next
		}
		i++
	}
}

// beginStarts prepares the decision of a Service, and returns the starts of the one before.
func (t *Tracker) beginStarts(e *service) starts {
	before := e.starts
	e.starts, t.nextStep = nil, time.Time{}
	if e.spec != nil && e.plan.slowStart > 0 {
		e.starts = starts{}
	}
	return before
}

// noteSteps records whether shares of a decided Service will grow.
func (t *Tracker) noteSteps(e *service) {
	if t.nextStep.IsZero() {
		delete(t.starting, e)
	} else {
		t.starting[e] = t.nextStep
	}
}

// SetTime sets the time that shares of endpoints depend on, and reports whether a share
// changes. Without a call, all endpoints have their whole share.
func (t *Tracker) SetTime(now time.Time) (changes bool) {
	t.now = now
	for e, next := range t.starting {
		if !next.After(now) {
			t.markDirty(e)
			changes = true
		}
	}
	return changes
}

// NextStep returns when a share changes next.
func (t *Tracker) NextStep() (at time.Time, any bool) {
	for _, next := range t.starting {
		if !any || next.Before(at) {
			at, any = next, true
		}
	}
	return at, any
}
