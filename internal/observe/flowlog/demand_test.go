package flowlog

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// kernel records what is reported: "", "all", or which of the Services of known.
type kernel struct {
	*Demand
	clock    time.Time
	reported string
	switches int
	err      error
	meantime func() // called during a switch
}

var known = []model.Name{{Namespace: "a", Name: "x"}, {Namespace: "a", Name: "y"}, {Namespace: "b", Name: "x"}}

func (k *kernel) SwitchFlows(of dataplane.FlowSelection) error {
	k.switches++
	if k.meantime != nil {
		k.meantime()
	}
	if k.err != nil {
		return k.err
	}
	k.reported = ""
	if of.All {
		k.reported = "all"
	} else if of.Some != nil {
		for _, name := range known {
			if of.Some(intent.PortID{Service: name}) {
				k.reported += " " + name.String()
			}
		}
	}
	return nil
}

func newKernel() *kernel {
	k := &kernel{clock: begun}
	k.Demand = NewDemand(k, slog.New(slog.DiscardHandler))
	k.now = func() time.Time { return k.clock }
	return k
}

// pass lets time pass, with the steps that Run would make.
func (k *kernel) pass(d time.Duration) {
	end := k.clock.Add(d)
	for wait := k.step(); wait > 0 && !k.clock.Add(wait).After(end); wait = k.step() {
		k.clock = k.clock.Add(wait)
	}
	k.clock = end
}

func (k *kernel) want(t *testing.T, reported string, switches int) {
	t.Helper()
	if k.reported != reported || k.switches != switches {
		t.Errorf("reported %q after %d switches, want %q after %d", k.reported, k.switches, reported, switches)
	}
}

func wantSince(t *testing.T, w *Watching, want time.Time) {
	t.Helper()
	if since, problem, _ := w.State(); !since.Equal(want) || problem != "" {
		t.Errorf("reported since %v, problem %q, want %v", since, problem, want)
	}
}

// Flows are reported from the first watcher on until some seconds after the last one.
func TestDemandFollowsWatchers(t *testing.T) {
	k := newKernel()
	k.pass(time.Hour)
	k.want(t, "", 0)
	first := k.Watch(Filter{})
	_, _, changed := first.State()
	wantSince(t, first, time.Time{})
	k.pass(time.Second)
	k.want(t, "all", 1)
	<-changed
	on := k.clock.Add(-time.Second)
	second := k.Watch(Filter{Pod: "a/b"})
	wantSince(t, second, on)
	if !first.TurnedOn || second.TurnedOn || !k.Since().Equal(on) {
		t.Errorf("turned on by the first %v, by the second %v, since %v", first.TurnedOn, second.TurnedOn, k.Since())
	}
	first.Close()
	k.pass(time.Hour)
	k.want(t, "all", 1)
	second.Close()
	k.pass(linger - time.Millisecond)
	k.want(t, "all", 1)
	k.pass(time.Millisecond)
	k.pass(0)
	k.want(t, "", 2)
	if !k.Since().IsZero() {
		t.Error("the flows of all Services are reported without a watcher")
	}
}

// A watcher of refusals alone costs no flow anything, and neither does one of remembered events.
func TestDemandWithoutFlows(t *testing.T) {
	k := newKernel()
	w := k.Watch(Filter{Kinds: []dataplane.FlowEventKind{dataplane.FlowRefused, dataplane.FlowDropped}})
	k.pass(time.Hour)
	k.want(t, "", 0)
	w.Close()
	defer k.Watch(Filter{Kinds: []dataplane.FlowEventKind{dataplane.FlowRefused, dataplane.FlowClosed}}).Close()
	k.pass(time.Second)
	k.want(t, "all", 1)
	(*Demand)(nil).Watch(Filter{}).Close()
}

// The kernel reports the Services that watchers select, and no others.
func TestDemandOfServices(t *testing.T) {
	k := newKernel()
	x := k.Watch(Filter{Namespace: "a", Service: "x"})
	k.pass(time.Second)
	k.want(t, " a/x", 1)
	started := k.clock
	a := k.Watch(Filter{Namespace: "a"})
	k.pass(time.Second)
	k.want(t, " a/x a/y", 2)
	wantSince(t, a, started)
	wantSince(t, x, begun)
	y := k.Watch(Filter{Namespace: "a", Service: "y"}) // its Service is reported already
	wantSince(t, y, started)
	all := k.Watch(Filter{})
	k.pass(time.Second)
	k.want(t, "all", 3)
	a.Close()
	all.Close()
	k.pass(time.Hour)
	k.want(t, " a/x a/y", 4)
	wantSince(t, y, started) // without a gap
	if !k.Since().IsZero() {
		t.Error("the flows of all Services are reported")
	}
	byName := k.Watch(Filter{Service: "x"})
	k.pass(time.Second)
	k.want(t, " a/x a/y b/x", 5)
	for _, w := range []*Watching{x, y, byName} {
		w.Close()
	}
	k.pass(time.Hour)
	k.want(t, "", 6)
}

// Watchers that come and go, 100 in a second, do not make the kernel work.
func TestDemandOfRestlessWatchers(t *testing.T) {
	k := newKernel()
	const seconds = 60
	for n := range 100 * seconds {
		w := k.Watch(Filter{})
		k.pass(5 * time.Millisecond)
		w.Close()
		k.pass(5 * time.Millisecond)
		_ = n
	}
	k.want(t, "all", 1)
	k.pass(time.Hour)
	k.want(t, "", 2)

	k = newKernel()
	for n := range 100 * seconds {
		w := k.Watch(Filter{Namespace: fmt.Sprint(n)})
		k.pass(5 * time.Millisecond)
		w.Close()
		k.pass(5 * time.Millisecond)
		if len(k.interests) > maxTargets+1 {
			t.Fatalf("%d targets are remembered", len(k.interests))
		}
	}
	if most := seconds * int(time.Second/switchPause); k.switches > most {
		t.Errorf("%d switches in %d seconds, want %d at most", k.switches, seconds, most)
	}
	k.pass(time.Hour)
	if k.reported != "" || len(k.interests) > 0 {
		t.Errorf("reported %q, %d targets", k.reported, len(k.interests))
	}
}

// A switch that fails is repeated, and watchers learn why they see no flows.
func TestDemandFails(t *testing.T) {
	k := newKernel()
	k.err = errors.New("no room")
	w := k.Watch(Filter{})
	k.pass(switchRetry - 1)
	if since, problem, _ := w.State(); !since.IsZero() || problem != "no room" || k.switches != 1 {
		t.Errorf("reported since %v, problem %q after %d switches", since, problem, k.switches)
	}
	k.err = nil
	k.pass(switchRetry)
	k.want(t, "all", 2)
	wantSince(t, w, begun.Add(switchRetry))

	w.Close()
	k.err = errors.New("no room")
	k.pass(linger + switchRetry - 1)
	k.want(t, "all", 3)
	k.err = nil
	k.pass(switchRetry)
	k.want(t, "", 4)
}

// A watcher that comes during a switch is not reported by it.
func TestDemandDuringASwitch(t *testing.T) {
	k := newKernel()
	var late *Watching
	k.meantime = func() {
		k.meantime = nil
		late = k.Watch(Filter{Namespace: "b"})
	}
	early := k.Watch(Filter{Namespace: "a"})
	k.step()
	wantSince(t, early, begun)
	wantSince(t, late, time.Time{})
	k.pass(time.Second)
	k.want(t, " a/x a/y b/x", 2)
	wantSince(t, late, begun.Add(switchPause))
}
