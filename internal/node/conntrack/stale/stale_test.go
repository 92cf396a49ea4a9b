package stale

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestFlowsFollowTheirServiceWhenAnEndpointGoes(t *testing.T) {
	w := newWorld(t)
	r := w.reconciler()
	w.translate(everyFrontend(epA, epA6)...)
	apply(t, r, upserts(port4(epA), port6(epA6)))
	flows := w.flowToEveryFrontend()
	wantAnswers(t, "at first", flows, epA, epA6)

	w.translate(everyFrontend(epB, epB6)...)
	wantAnswers(t, "the rules alone do not move a flow: else this test shows nothing", flows, epA, epA6)
	apply(t, r, upserts(port4(epB), port6(epB6)))
	wantAnswers(t, "after the endpoint went", flows, epB, epB6)
	if n := r.deleted.Load(); n != 6 {
		t.Errorf("%d entries were deleted, want 6", n)
	}
}

func TestFlowsFindWhatIsNewerThanThey(t *testing.T) {
	for name, before := range map[string][]intent.Changes{
		"the first endpoint": {upserts(port4(), port6())},
		"the Service":        {upserts()},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			r := w.reconciler()
			w.translate()
			for _, c := range before {
				apply(t, r, c)
			}
			lookAgain(t, r)
			flows := w.flowToEveryFrontend()
			wantAnswers(t, "before", flows, "", "")

			w.translate(everyFrontend(epA, epA6)...)
			wantAnswers(t, "the rules alone do not move a flow: else this test shows nothing", flows, "", "")
			apply(t, r, upserts(port4(epA), port6(epA6)))
			wantAnswers(t, "after", flows, epA, epA6)
		})
	}
}

// The endpoint of a new client is removed while its answer is on the way.
func TestAnAnswerOnTheWayIsNotLost(t *testing.T) {
	w := newWorld(t)
	r := w.reconciler()
	const slow = "10.244.0.2:54"
	answer := w.serveLate(slow)
	w.translate("10.96.0.10 53>" + slow)
	apply(t, r, upserts(port4(slow)))
	asked := w.flow("10.96.0.10:53")
	if _, err := asked.s.WriteToUDPAddrPort([]byte("question"), asked.to); err != nil {
		t.Fatal(err)
	}
	arrived := <-answer
	w.translate("10.96.0.10 53>" + epB)
	apply(t, r, upserts(port4(epB)))
	arrived()
	b := make([]byte, 64)
	asked.s.SetReadDeadline(time.Now().Add(time.Minute))
	if _, from, err := asked.s.ReadFromUDPAddrPort(b); err != nil || from != asked.to {
		t.Errorf("answer from %v, error %v, want %v", from, err, asked.to)
	}
	lookAgain(t, r)
	if got := asked.askFor(100); got != epB {
		t.Errorf("the next question was answered by %q, want %q", got, epB)
	}
}

func TestNothingIsLeftOfAPortWithoutEndpointsAndOfOneThatIsGone(t *testing.T) {
	w := newWorld(t)
	r := w.reconciler()
	w.translate(everyFrontend(epA, epA6)...)
	apply(t, r, upserts(port4(epA), port6(epA6)))
	flows := w.flowToEveryFrontend()
	wantAnswers(t, "at first", flows, epA, epA6)

	w.translate()
	apply(t, r, upserts(port4(), port6(epA6)))
	left := w.entries("")
	if len(left) != 2 || strings.Contains(strings.Join(left, ""), "10.244") {
		t.Errorf("left of the port without endpoints, beside the two of the other:\n%s", strings.Join(left, "\n"))
	}
	apply(t, r, intent.Changes{Deletes: []intent.PortID{portID(model.IPv6)}})
	if left := w.entries(""); len(left) != 0 {
		t.Errorf("left of the Service that is gone:\n%s", strings.Join(left, "\n"))
	}
}

func TestAnEndpointThatWentWhileNoAgentRan(t *testing.T) {
	w := newWorld(t)
	w.translate(everyFrontend(epA, epA6)...)
	flows := w.flowToEveryFrontend()
	wantAnswers(t, "at first", flows, epA, epA6)
	w.translate(everyFrontend(epB, epB6)...)
	apply(t, w.reconciler(), upserts(port4(epB), port6(epB6)))
	wantAnswers(t, "after the start", flows, epB, epB6)
}

func TestEntriesThatAreRightOrNotOursStay(t *testing.T) {
	w := newWorld(t)
	r := w.reconciler()
	// 192.0.2.77 and the node's port 31000 are translated by another program.
	others := []string{"192.0.2.77 53>" + epA, "* 31000>" + epA}
	w.translate(slices.Concat(everyFrontend(epA, epA6), others)...)
	local, retained := port4(epA, epB), port6(epA6, epB6)
	apply(t, r, upserts(local, retained))
	keep := map[string]*flow{
		"other address":  w.flow("192.0.2.77:53"),
		"other port":     w.flow("172.30.0.1:31000"),
		"endpoint":       w.flow(epA),
		"IPv6 ClusterIP": w.flow("[fd96::10]:53"),
		"NodePort":       w.flow("172.30.0.1:30053"),
	}
	wantAnswers(t, "at first", keep, epA, epA6)
	w.plantInZone(7)
	before := w.entries("")

	// epA is left only to traffic from outside that finds it here; epA6 serves
	// on while it terminates.
	local = port4(epA, epB)
	local.Endpoints[0].ClusterPolicy, local.Endpoints[0].LocalPolicy = false, true
	retained = port6(epB6)
	retained.ServingUnselected = []intent.Endpoint{{Addr: netip.MustParseAddrPort(epA6)}}
	w.translate(slices.Concat(everyFrontend(epB, epB6), others)...)
	apply(t, r, upserts(local, retained))
	if after := w.entries(""); !slices.Equal(before, after) {
		t.Errorf("entries:\n%s\nwere:\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
	wantAnswers(t, "with the endpoints still right", keep, epA, epA6)

	// Now they go for good, with their Services: only their entries do.
	apply(t, r, intent.Changes{Deletes: []intent.PortID{portID(model.IPv4), portID(model.IPv6)}})
	delete(keep, "IPv6 ClusterIP")
	delete(keep, "NodePort")
	wantAnswers(t, "without the Services", keep, epA, epA6)
	if got, want := len(w.entries("")), len(before)-2; got != want {
		t.Errorf("%d entries are left, want %d:\n%s", got, want, strings.Join(w.entries(""), "\n"))
	}
}

// A dataplane before netfilter must keep untranslated entries, and delete those that an
// earlier proxy translated.
func TestBesideADataplaneInFrontOfNetfilterOnlyTranslatedEntriesGo(t *testing.T) {
	w := newWorld(t)
	w.translate("10.96.0.10 53>" + epA)
	flows := map[string]*flow{"translated": w.flow("10.96.0.10:53"), "not translated": w.flow("203.0.113.10:53")}
	flows["translated"].ask()
	flows["not translated"].ask()
	r, err := New(Config{Table: w.table, TranslatedOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	apply(t, r, upserts(port4(epA)))
	if n := len(w.entries("")); n != 2 {
		t.Errorf("%d entries with the endpoint still serving, want 2", n)
	}
	apply(t, r, upserts(port4(epB)))
	if left := w.entries(""); len(left) != 1 || !strings.Contains(left[0], "203.0.113.10") {
		t.Errorf("left: %q", left)
	}
}

// plantInZone adds an entry to another zone that would be stale in zone 0.
func (w *world) plantInZone(zone int) {
	w.in("NODE", func() error {
		out, err := exec.Command("conntrack", "-I", "-p", "udp", "-s", "172.30.0.9", "-d", "10.96.0.10", "--sport", "4000", "--dport", "53",
			"--dst-nat", "10.244.0.99", "-w", fmt.Sprint(zone), "-t", "100").CombinedOutput()
		if err != nil {
			return fmt.Errorf("conntrack -I: %w: %s", err, out)
		}
		return nil
	})
}
