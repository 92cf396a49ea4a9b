package flowlog

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

const (
	// linger is how long flows are reported after the last watcher has left. A page that is loaded
	// again, and watchers that come and go, then cost the kernel nothing.
	linger = 10 * time.Second
	// switchPause is the minimum time between two changes in the kernel, and switchRetry that after a
	// failed one.
	switchPause = 250 * time.Millisecond
	switchRetry = 2 * time.Second
	// maxTargets is the maximum number of Services or namespaces that are selected. More select all.
	maxTargets = 64
)

// target is the Services of a filter; "" selects all.
type target struct{ namespace, service string }

// covers reports whether t selects all that o selects.
func (t target) covers(o target) bool {
	return (t.namespace == "" || t.namespace == o.namespace) && (t.service == "" || t.service == o.service)
}

// interest is in a target that is or was watched.
type interest struct {
	watchers int
	left     time.Time // the last watcher, if there is none
	since    time.Time // from when on the kernel reports all its flows; zero: not yet
}

// Demand has a dataplane report flows while they are watched, and for some seconds longer. Any
// goroutine may call its methods. A nil Demand reports nothing.
type Demand struct {
	flows dataplane.FlowSwitch
	log   *slog.Logger
	now   func() time.Time
	wake  chan struct{}

	mu        sync.Mutex
	interests map[target]*interest
	on        []target // that the kernel reports, the least of them that cover all
	switched  time.Time
	problem   string        // of the last switch; "": it succeeded
	changed   chan struct{} // closed when since or problem change
}

// NewDemand returns a Demand that Run serves.
func NewDemand(flows dataplane.FlowSwitch, log *slog.Logger) *Demand {
	return &Demand{
		flows: flows, log: log, now: time.Now, wake: make(chan struct{}, 1), interests: map[target]*interest{}, changed: make(chan struct{}),
	}
}

// Run switches reports of flows on and off until ctx ends.
func (d *Demand) Run(ctx context.Context) {
	if d == nil {
		return
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.wake:
		case <-timer.C:
		}
		if wait := d.step(); wait > 0 {
			timer.Reset(wait)
		}
	}
}

// Watching is one watcher of a Demand. A nil Watching watches no flows.
type Watching struct {
	demand *Demand
	of     target
	// TurnedOn says that no flows of the filter were reported before this watcher came.
	TurnedOn bool
}

// Watch has the flows of a filter reported until the caller calls Close. It returns nil for a filter
// without flows: refusals and drops are always reported.
func (d *Demand) Watch(f Filter) *Watching {
	isFlow := func(k dataplane.FlowEventKind) bool { return k < dataplane.FlowRefused }
	if d == nil || len(f.Kinds) > 0 && !slices.ContainsFunc(f.Kinds, isFlow) {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	of := target{f.Namespace, f.Service}
	if d.interests[of] == nil && len(d.interests) >= maxTargets {
		of = target{}
	}
	if d.interests[of] == nil {
		d.interests[of] = &interest{since: d.since(of)}
	}
	w := d.interests[of]
	w.watchers++
	d.notify()
	return &Watching{demand: d, of: of, TurnedOn: w.since.IsZero()}
}

// Close ends the watcher.
func (w *Watching) Close() {
	if w == nil {
		return
	}
	d := w.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.interests[w.of]
	if i.watchers--; i.watchers == 0 {
		i.left = d.now()
		d.notify()
	}
}

// State returns from when on all flows of the watcher are reported, or why they are not. Both are
// zero until they are turned on. changed is closed when the state may have changed; nil: never.
func (w *Watching) State() (since time.Time, problem string, changed <-chan struct{}) {
	if w == nil {
		return since, "", nil
	}
	d := w.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	if since = d.interests[w.of].since; since.IsZero() {
		problem = d.problem
	}
	return since, problem, d.changed
}

// Since returns from when on the flows of all Services are reported; zero: they are not.
func (d *Demand) Since() time.Time {
	if d == nil {
		return time.Time{}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.since(target{})
}

// since returns from when on the kernel reports all flows of a target. The caller holds mu.
func (d *Demand) since(of target) (since time.Time) {
	for t, w := range d.interests {
		if t.covers(of) && !w.since.IsZero() && (since.IsZero() || w.since.Before(since)) {
			since = w.since
		}
	}
	return since
}

func (d *Demand) notify() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// step switches the kernel if the watchers have changed and it is time. It returns the time until
// the next step; 0: when the watchers change. Only one goroutine may call it.
func (d *Demand) step() (wait time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.now()
	sooner := func(t time.Duration) {
		if wait == 0 || t < wait {
			wait = t
		}
	}
	for t, w := range d.interests {
		if w.watchers > 0 {
			continue
		}
		if left := w.left.Add(linger).Sub(now); left > 0 {
			sooner(left)
		} else {
			delete(d.interests, t)
		}
	}
	wanted := least(d.interests)
	if d.problem == "" && slices.Equal(wanted, d.on) {
		return wait
	}
	pause := switchPause
	if d.problem != "" {
		pause = switchRetry
	}
	if left := d.switched.Add(pause).Sub(now); left > 0 && !d.switched.IsZero() {
		sooner(left)
		return wait
	}
	d.mu.Unlock() // watchers must not wait for the kernel
	err := d.flows.SwitchFlows(selection(wanted))
	d.mu.Lock()
	d.switchedTo(wanted, err)
	if d.problem != "" {
		sooner(switchRetry)
	}
	return wait
}

// switchedTo records a change in the kernel. The caller holds mu.
func (d *Demand) switchedTo(wanted []target, err error) {
	d.switched = d.now()
	close(d.changed)
	d.changed = make(chan struct{})
	if err != nil {
		if d.problem == "" {
			d.log.Warn("flow events cannot be turned on or off; it is tried again", "err", err)
		}
		d.problem = err.Error()
		return
	}
	d.problem, d.on = "", wanted
	for t, w := range d.interests {
		if w.since.IsZero() && slices.ContainsFunc(wanted, func(o target) bool { return o.covers(t) }) {
			w.since = d.switched
		}
	}
}

// least returns the targets that no other one covers, sorted.
func least(interests map[target]*interest) (out []target) {
	all := slices.Collect(maps.Keys(interests))
	for _, t := range all {
		if !slices.ContainsFunc(all, func(o target) bool { return o != t && o.covers(t) }) {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b target) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.service, b.service))
	})
	return out
}

// selection selects the Service ports of targets.
func selection(of []target) dataplane.FlowSelection {
	switch {
	case len(of) == 0:
		return dataplane.FlowSelection{}
	case slices.Contains(of, target{}):
		return dataplane.FlowSelection{All: true}
	}
	return dataplane.FlowSelection{Some: func(p intent.PortID) bool {
		own := target{p.Service.Namespace, p.Service.Name}
		return slices.ContainsFunc(of, func(t target) bool { return t.covers(own) })
	}}
}
