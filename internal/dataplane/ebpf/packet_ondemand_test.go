package ebpf

import (
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// entriesOf returns the number of entries of a map.
func entriesOf[K, V any](t testing.TB, m objects.Map) (n int) {
	t.Helper()
	must.Do(t, objects.Each(m, func(K, V) { n++ }))
	return n
}

// wantCounted fails unless so many directions of flows have counters of packets and bytes.
func (n *eventNode) wantCounted(t testing.TB, want int) {
	t.Helper()
	if have := entriesOf[objects.TCTuple, objects.TCTraffic](t, n.m(objects.TCMapFlowBytes)); have != want {
		t.Errorf("%d directions of flows are counted, want %d", have, want)
	}
}

func (n *eventNode) report(t testing.TB, of dataplane.FlowSelection) {
	t.Helper()
	must.Do(t, n.SwitchFlows(of))
	t.Cleanup(func() { must.Do(t, n.SwitchFlows(dataplane.FlowSelection{})) })
}

// With on-demand the kernel reports refusals always, and flows while they are wanted.
func TestPacketEventsOnDemand(t *testing.T) {
	n := newEventNode(t, func(c *Config) { c.FlowEvents = EventsOnDemand })
	n.checksComplete = false // see TestPacketAnswers
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP))
	before := n.open(t, p, 40000)
	before.talk(t, "P.", "<P.")
	n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)})
	n.want(t, "refused rejected_icmp")
	n.wantCounted(t, 0)

	n.report(t, dataplane.FlowSelection{All: true})
	before.talk(t, "R") // its first packet had no event
	during := n.open(t, p, 40001)
	n.open(t, p, 40002).talk(t, "P.", "<P.", "R")
	events := n.want(t, "opened", "answered", "opened", "answered", "closed RST")
	if f := events[4].Flow; f.PacketsToEndpoint != 4 || f.PacketsToClient != 2 {
		t.Errorf("%d and %d packets, want 4 and 2", f.PacketsToEndpoint, f.PacketsToClient)
	}
	n.wantCounted(t, 2)

	must.Do(t, n.SwitchFlows(dataplane.FlowSelection{}))
	during.talk(t, "P.", "<P.")
	n.open(t, p, 40003).talk(t, "R")
	n.wantCounted(t, 0)
	during.talk(t, "R")
	n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)})
	n.want(t, "refused rejected_icmp")
}

// The kernel reports the flows of the selected Services, also of those that come later, and no others.
func TestPacketEventsOfServices(t *testing.T) {
	n := newEventNode(t, func(c *Config) { c.FlowEvents = EventsOnDemand })
	n.checksComplete = false // see TestPacketAnswers
	v4, v6 := plans["IPv4"], plans["IPv6"]
	web := service(v4, protoTCP, endpoint(v4.far, 8080, elsewhere))
	other := service(v6, protoTCP, endpoint(v6.far, 8080, elsewhere))
	other.ID.Service.Name = "other"
	n.serve(t, web)
	n.report(t, dataplane.FlowSelection{Some: func(id intent.PortID) bool { return id.Service.Name == "other" }})
	n.open(t, v4, 40000).talk(t, "R")
	n.want(t)
	n.serve(t, web, other)
	n.open(t, v4, 40001).talk(t, "R")
	n.open(t, v6, 40001).talk(t, "R")
	n.want(t, "opened", "answered", "closed RST")
	if left := n.FlowEventCounts().LeftOut; left != 0 {
		t.Errorf("%d flows count as left out by the rate", left)
	}

	must.Do(t, n.SwitchFlows(dataplane.FlowSelection{Some: func(id intent.PortID) bool { return id.Service == web.ID.Service }}))
	if have := entriesOf[uint32, uint8](t, n.m(objects.TCMapReportedServices)); have != 1 {
		t.Errorf("%d Services are selected, want 1", have)
	}
	n.open(t, v6, 40002).talk(t, "R")
	n.want(t)
	n.open(t, v4, 40002).talk(t, "R")
	n.want(t, "opened", "answered", "closed RST")
	must.Do(t, n.SwitchFlows(dataplane.FlowSelection{}))
	if have := entriesOf[uint32, uint8](t, n.m(objects.TCMapReportedServices)); have != 0 {
		t.Errorf("%d Services are left", have)
	}
}

// If there are more Services than the map has room for, all are reported.
func TestPacketEventsOfTooManyServices(t *testing.T) {
	n := newEventNode(t, func(c *Config) { c.FlowEvents = EventsOnDemand })
	n.checksComplete = false // see TestPacketAnswers
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	selected := n.m(objects.TCMapReportedServices)
	n.report(t, dataplane.FlowSelection{Some: func(intent.PortID) bool { return false }})
	for id := range selected.MaxEntries() {
		must.Do(t, selected.Put(1<<31+id, uint8(1)))
	}
	n.open(t, p, 40000).talk(t, "R")
	n.want(t)
	n.report(t, dataplane.FlowSelection{Some: func(intent.PortID) bool { return true }})
	n.open(t, p, 40001).talk(t, "R")
	n.want(t, "opened", "answered", "closed RST")
}

// TestFlowsAreReportedUntilTheNextStart: an agent that was killed leaves events of flows on, and the next
// one turns them off.
func TestFlowsAreReportedUntilTheNextStart(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	cfg.FlowEvents = EventsOnDemand
	state := intent.State{Ports: []*intent.ServicePort{objectstest.SimplePort(1, 1)}, Node: intent.Node{Name: "node"}}
	flags := func(b *Backend) objects.TCSettingsFlags {
		return objects.TCSettingsFlags(objectstest.Settings(t, b.objects).Flags) & objects.EventSettings
	}
	want := func(what string, have, want objects.TCSettingsFlags) {
		t.Helper()
		if have != want {
			t.Errorf("%s: settings %b, want %b", what, uint32(have), uint32(want))
		}
	}
	const refused, all = objects.TCSettingsFlagsSETTING_EVENTS_REFUSED,
		objects.TCSettingsFlagsSETTING_EVENTS_REFUSED | objects.TCSettingsFlagsSETTING_EVENTS_FLOWS
	first, err := New(t.Context(), cfg)
	must.Do(t, err)
	if first.SwitchFlows(dataplane.FlowSelection{All: true}) == nil {
		t.Error("flows are reported before the first sync")
	}
	must.Do(t, first.Replace(t.Context(), state))
	must.Do(t, first.SwitchFlows(dataplane.FlowSelection{All: true}))
	want("turned on", flags(first), all)
	left := objectstest.Settings(t, first.objects)
	must.Do(t, first.Close())

	next, err := New(t.Context(), cfg)
	must.Do(t, err)
	want("an agent that ends turns events off", flags(next), 0)
	must.Do(t, next.m(objects.TCMapNodeSettings).Put(uint32(0), left)) // as a killed one leaves them
	must.Do(t, next.Replace(t.Context(), state))
	want("the next start", flags(next), refused)
	must.Do(t, next.Close())
	if next.SwitchFlows(dataplane.FlowSelection{All: true}) == nil {
		t.Error("flows are reported after the end")
	}
}
