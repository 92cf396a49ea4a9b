package autopilot

import (
	"fmt"
	"testing"
	"time"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
)

// spaceOf returns a namespace with short-lived UDP flows, by its timeout in seconds.
func spaceOf(netns uint64, name string, rate float64, timeout int) space {
	all := rate * float64(timeout)
	window := rate * capacity.AgeWindow.Seconds()
	return space{Netns: netns, Name: name, Own: name == "(here)", Entries: int(all), Timeouts: map[string]int{timeoutUDP: timeout},
		Ages: map[string]capacity.Ages{timeoutUDP: {Timeout: 1e9 * 30, All: all, Fresh: window, Early: window, Late: window}}}
}

// A pod sets the timeouts of its network namespaces, and makes as many namespaces as it likes. So
// what they need changes no timeout of the node's.
func TestAPodDoesNotShortenTheNodesTimeouts(t *testing.T) {
	limits := bounds{Memory: 392 * 200_000, PageBytes: 4096, Fixed: map[setting]bool{{Sysctl: sizeMax}: true, {Sysctl: sizeBuckets}: true}}
	here := spaceOf(1, "(here)", 1000, 30)
	long := spaceOf(2, "pod", 100, 30)
	long.Timeouts[timeoutUDP] = 100_000_000
	var nested []space
	for i := range uint64(50) {
		nested = append(nested, spaceOf(10+i, fmt.Sprintf("x[%d]", i), 1500, 30))
	}
	for name, pods := range map[string][]space{"a long timeout": {long}, "many namespaces": nested, "none": nil} {
		m := measured{Max: 65536, Buckets: 65536, ExpectMax: 1024, Spaces: append([]space{here}, pods...)}
		for _, s := range decide(m, newMemory(nil), limits) {
			if s.Netns == 1 {
				t.Errorf("%s: %s: %s", name, s, s.Why)
			}
		}
	}
}

// Of pods, one with a large need shortens no timeouts of one with a small need.
func TestOnlyLargeNeedsAreShortened(t *testing.T) {
	limits := bounds{Memory: 392 * 100_000, PageBytes: 4096, Fixed: map[setting]bool{{Sysctl: sizeMax}: true, {Sysctl: sizeBuckets}: true}}
	m := measured{Max: 1 << 20, Buckets: 1 << 20, ExpectMax: 1024,
		Spaces: []space{spaceOf(1, "small", 300, 30), spaceOf(2, "large", 10_000, 30)}}
	if got, want := steps(decide(m, newMemory(nil), limits)), "nf_conntrack_udp_timeout of large 30 -> 10"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// Full namespaces of pods do not keep the size small that the node needs.
func TestAPodDoesNotKeepTheNodesTableSmall(t *testing.T) {
	limits := bounds{Memory: 392 * 400_000, PageBytes: 4096}
	m := measured{Max: 65536, Buckets: 65536, ExpectMax: 1024, Spaces: []space{{Netns: 1, Name: "(here)", Own: true, Entries: 60_000}}}
	for i := range uint64(20) {
		m.Spaces = append(m.Spaces, space{Netns: 10 + i, Name: "pod", Entries: 65_000})
	}
	for _, s := range decide(m, newMemory(nil), limits) {
		if s.Sysctl == sizeMax && s.To >= 131072 {
			return
		}
	}
	t.Error("nf_conntrack_max was not raised")
}

// Namespaces that no longer exist leave nothing behind.
func TestDeletedNamespacesAreForgotten(t *testing.T) {
	p := &Pilot{mem: newMemory(nil), advised: map[setting]advice{{7, timeoutUDP}: {}, {8, timeoutUDP}: {}, {0, sizeMax}: {}}}
	p.mem.calm[setting{7, timeoutUDP}], p.mem.calm[setting{8, timeoutUDP}] = time.Time{}, time.Time{}
	p.mem.Records[setting{8, timeoutUDP}] = record{Found: 30, Set: 10}
	p.fixed = map[setting]time.Time{{7, timeoutUDP}: {}, {8, timeoutUDP}: {}}
	p.mem.reconcile(map[setting]int{{8, timeoutUDP}: 10})
	p.forget(map[uint64]conntrack.Namespace{0: {}, 8: {}})
	if len(p.mem.calm) != 1 || len(p.advised) != 2 || len(p.fixed) != 1 {
		t.Errorf("calm %v, advised %v, fixed %v", p.mem.calm, p.advised, p.fixed)
	}
}

// A pod makes many namespaces, which take long to measure. The autopilot takes a tenth of a CPU at most.
func TestALongMeasurementIsFollowedByALongPause(t *testing.T) {
	p := &Pilot{Config: Config{Interval: 5 * time.Second}}
	for took, want := range map[time.Duration]time.Duration{
		0: 5 * time.Second, 100 * time.Millisecond: 4900 * time.Millisecond, time.Second: 9 * time.Second, time.Minute: 9 * time.Minute,
	} {
		if got := p.pause(took); got != want {
			t.Errorf("after %v: %v, want %v", took, got, want)
		}
	}
}
