package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/flows"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/services"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func reportAll(c *Config) { c.FlowEvents = EventsAll }

// eventNode is a packetNode with a reader of its events.
type eventNode struct {
	*packetNode
	ring *ringbuf.Reader
}

func newEventNode(t testing.TB, change ...func(*Config)) *eventNode {
	t.Helper()
	return readEvents(t, newPacketNode(t, append([]func(*Config){reportAll}, change...)...))
}

func readEvents(t testing.TB, of *packetNode) *eventNode {
	t.Helper()
	n := &eventNode{packetNode: of}
	ring, err := ringbuf.NewReader(n.m(objects.TCMapEvents))
	must.Do(t, err)
	t.Cleanup(func() { ring.Close() })
	n.ring = ring
	return n
}

// events reads all events in the ring.
func (n *eventNode) events(t testing.TB) (out []dataplane.FlowEvent) {
	t.Helper()
	must.Do(t, n.ring.Flush())
	for {
		record, err := n.ring.Read()
		if errors.Is(err, ringbuf.ErrFlushed) {
			return out
		}
		must.Do(t, err)
		out = n.flows.Decode(out, record.RawSample)
	}
}

// restart forgets all events and open flows.
func (n *eventNode) restart(t testing.TB) {
	t.Helper()
	n.events(t)
	n.flows = flows.New(&n.cfg, n.objects, n.services)
}

// want fails unless these events were stored, as "kind reason".
func (n *eventNode) want(t testing.TB, want ...string) []dataplane.FlowEvent {
	t.Helper()
	events := n.events(t)
	var have []string
	for _, e := range events {
		text := e.Kind.String()
		if e.Reason != "" {
			text += " " + e.Reason
		}
		have = append(have, text)
	}
	if !slices.Equal(have, want) {
		t.Fatalf("events %q, want %q", have, want)
	}
	return events
}

func TestPacketEvents(t *testing.T) {
	n := newEventNode(t)
	n.checksComplete = false // see TestPacketAnswers
	family := func(f func(*testing.T, *plan)) func(*testing.T) {
		return func(t *testing.T) {
			eachFamily(t, n.packetNode, func(t *testing.T, p *plan) { n.restart(t); f(t, p) })
		}
	}
	transport := func(f func(*testing.T, *plan, uint8)) func(*testing.T) {
		return func(t *testing.T) {
			eachTransport(t, n.packetNode, func(t *testing.T, p *plan, proto uint8) { n.restart(t); f(t, p, proto) })
		}
	}
	t.Run("Connection", family(n.eventsOfConnection))
	t.Run("Resets", family(n.eventsOfResets))
	t.Run("Datagrams", family(n.eventsOfDatagrams))
	t.Run("Transfer", family(n.eventsOfTransfer))
	t.Run("Refusals", transport(n.eventsOfRefusals))
	t.Run("Drops", transport(n.eventsOfDrops))
	t.Run("NoFlow", family(n.eventsOfNoFlow))
	t.Run("Stale", transport(n.eventsOfStale))
	t.Run("SweptAndEvicted", transport(n.eventsOfSweep))
	t.Run("DeletedService", family(n.eventsOfDeletedService))
}

// wantFlow fails unless an event is of this client's flow to the Service.
func wantFlow(t *testing.T, e dataplane.FlowEvent, proto uint8, client, front, server netip.AddrPort) {
	t.Helper()
	f := e.Flow
	if f.Client != client || f.ServiceAddress != front || f.Endpoint != server {
		t.Errorf("%s: %s to %s at %s, want %s to %s at %s", e.Kind, f.Client, f.ServiceAddress, f.Endpoint, client, front, server)
	}
	if want := fmt.Sprintf("web-%d", proto); f.Port.Service.Name != want || uint8(f.Protocol) != proto {
		t.Errorf("%s: Service %s, protocol %s, want %s", e.Kind, f.Port.Service, f.Protocol, want)
	}
	if since := time.Since(e.Time); since < 0 || since > time.Minute {
		t.Errorf("%s: %s ago", e.Kind, since)
	}
}

func (n *eventNode) eventsOfConnection(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
	c.syn(t)
	c.forge(t, "S", clientISN, 0) // repeated
	wantFlow(t, n.want(t, "opened")[0], protoTCP, c.client, c.front, c.server)
	c.forge(t, "<.", 7, 7) // of an older connection
	c.forge(t, "R", 7, 0)
	n.want(t)
	c.talk(t, "<S.")
	answered := n.want(t, "answered")[0]
	wantFlow(t, answered, protoTCP, c.client, c.front, c.server)
	if answered.Flow.Handshake <= 0 {
		t.Errorf("handshake %s", answered.Flow.Handshake)
	}
	c.talk(t, ".", "P.", "<P.", "F.", "<F.")
	n.want(t)
	c.talk(t, ".")
	closed := n.want(t, "closed FIN")[0]
	wantFlow(t, closed, protoTCP, c.client, c.front, c.server)
	f := closed.Flow
	if f.Handshake != answered.Flow.Handshake || f.Opened.IsZero() {
		t.Errorf("handshake %s, opened %s", f.Handshake, f.Opened)
	}
	header := uint64(40)
	if p.client.Is6() {
		header = 60
	}
	if f.PacketsToEndpoint != 7 || f.PacketsToClient != 4 || f.BytesToEndpoint != 7*header || f.BytesToClient != 4*header {
		t.Errorf("%d packets of %d bytes to the endpoint, %d of %d back", f.PacketsToEndpoint, f.BytesToEndpoint,
			f.PacketsToClient, f.BytesToClient)
	}
	c.forge(t, "<F.", c.answered-1, c.sent) // the last ACK was lost
	c.talk(t, ".", "R")
	n.want(t)
}

func (n *eventNode) eventsOfResets(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	for i, packets := range [][]string{{"<R."}, {"<S.", "R"}, {"<S.", ".", "R"}, {"<S.", ".", "<R."}} {
		c := n.newConn(ap(p.client, uint16(41000+i)), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
		c.syn(t)
		c.talk(t, packets...)
		want := []string{"opened", "answered", "closed RST"}
		if i == 0 {
			want = []string{"opened", "closed RST"}
		}
		n.want(t, want...)
	}
}

func (n *eventNode) eventsOfDatagrams(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
	for range 2 {
		c.seen = n.datagram(t, inEth0, c.client, c.front).v.src
	}
	for range 2 {
		n.datagram(t, inTun0, c.server, c.seen)
	}
	for _, e := range n.want(t, "opened", "answered") {
		wantFlow(t, e, protoUDP, c.client, c.front, c.server)
	}
}

// eventsOfTransfer: a TFTP request is answered from another port, whose packets are a flow of
// their own.
func (n *eventNode) eventsOfTransfer(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	seen := n.datagram(t, inEth0, client, front).v.src
	wantFlow(t, n.want(t, "opened")[0], protoUDP, client, front, ap(p.far, 1069))
	n.datagram(t, inTun0, ap(p.far, tid), seen)
	events := n.want(t, "answered", "opened")
	wantFlow(t, events[0], protoUDP, client, front, ap(p.far, 1069))
	wantFlow(t, events[1], protoUDP, client, ap(p.clusterIP, tid), ap(p.far, tid))
	if events[0].Flow.Handshake <= 0 {
		t.Errorf("handshake %s", events[0].Flow.Handshake)
	}
	n.datagram(t, inEth0, client, ap(p.clusterIP, tid))
	n.datagram(t, inTun0, ap(p.far, tid), seen)
	n.want(t)
	n.datagram(t, inTun0, ap(p.far, tid+1), seen) // another transfer, but no second answer
	wantFlow(t, n.want(t, "opened")[0], protoUDP, client, ap(p.clusterIP, tid+1), ap(p.far, tid+1))
	must.Do(t, n.flows.Sweep(context.Background()))
	n.flows.TakeSwept(nil)
	n.ageFlows(t, 48*3600)
	must.Do(t, n.flows.Sweep(context.Background()))
	var packets [2]uint64
	ends := n.flows.TakeSwept(nil)
	for _, e := range ends {
		if e.Reason == dataplane.EndTimeout && e.Flow.ServiceAddress.Port() == tid {
			packets = [2]uint64{e.Flow.PacketsToEndpoint, e.Flow.PacketsToClient}
		}
	}
	if len(ends) != 3 || packets != [2]uint64{1, 2} {
		t.Errorf("%d ends, want 3; the transfer had %v packets, want 1 and 2", len(ends), packets)
	}
}

func (n *eventNode) eventsOfRefusals(t *testing.T, p *plan, proto uint8) {
	client := ap(p.client, 40000)
	send := func(front netip.AddrPort, want string) {
		t.Helper()
		n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: first(proto)})
		wantFlow(t, n.want(t, want)[0], proto, client, front, netip.AddrPort{})
	}
	n.serve(t, service(p, proto))
	send(ap(p.clusterIP, 80), map[uint8]string{protoTCP: "refused rejected_rst", protoUDP: "refused rejected_icmp"}[proto])
	sp := service(p, proto, endpoint(p.far, 8080, elsewhere))
	route(sp, intent.NodePort, intent.Drop, intent.ToCluster)
	sp.Frontends[2].Kind, sp.Frontends[2].SourceRanges = intent.LoadBalancerIP, []netip.Prefix{}
	n.serve(t, sp)
	send(ap(p.eth0, 30080), "refused drop_policy_local")
	send(ap(p.externalIP, 80), "refused drop_source_range")
}

func (n *eventNode) eventsOfDrops(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	client, front, server := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080)
	f := frame{proto: proto, src: client, dst: front, flags: first(proto)}
	// Of a flow that is not stored.
	n.setSNATPorts(t, 50000)
	n.goOn(t, p, proto, 40001)
	n.events(t)
	n.send(t, inEth0, f)
	wantFlow(t, n.want(t, "dropped drop_snat_ports")[0], proto, client, front, server)
	n.restart(t)
	n.forget(t)
	n.unreachable(t, p.far, func() { n.send(t, inEth0, f) })
	wantFlow(t, n.want(t, "dropped drop_no_route")[0], proto, client, front, server)
	// Of a known one, in the next second.
	n.send(t, inEth0, f)
	n.ageFlows(t, 2)
	n.unreachable(t, p.far, func() { n.send(t, inEth0, f) })
	wantFlow(t, n.want(t, "opened", "dropped drop_no_route")[1], proto, client, front, server)
}

// unreachable runs f while an address has no route.
func (n *eventNode) unreachable(t *testing.T, a netip.Addr, f func()) {
	t.Helper()
	_, dst, err := net.ParseCIDR(netip.PrefixFrom(a, a.BitLen()).String())
	must.Do(t, err)
	route := &netlink.Route{Dst: dst, Type: unix.RTN_UNREACHABLE}
	n.onThread(t, func() error { return netlink.RouteReplace(route) })
	f()
	n.onThread(t, func() error { return netlink.RouteDel(route) })
}

func (n *eventNode) eventsOfNoFlow(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	f := frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "."}
	n.send(t, inEth0, f)
	f.flags = "R"
	n.send(t, inEth0, f)
	for _, e := range n.want(t, "dropped rejected_no_flow", "dropped drop_no_flow") {
		wantFlow(t, e, protoTCP, f.src, f.dst, netip.AddrPort{})
	}
}

// eventsOfStale: the first packet of a new flow finds that the former one is over.
func (n *eventNode) eventsOfStale(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	c := n.running(t, p, proto)
	n.want(t, "opened", "answered")
	n.ageFlows(t, 48*3600)
	n.send(t, inEth0, frame{proto: proto, src: c.client, dst: c.front, flags: first(proto), seq: 77})
	n.want(t, "closed timeout", "opened")
	if proto == protoTCP {
		return
	}
	n.serve(t, service(p, proto, endpoint(p.far2, 8080, elsewhere)))
	n.datagram(t, inEth0, c.client, c.front)
	events := n.want(t, "closed endpoint gone", "opened")
	wantFlow(t, events[0], proto, c.client, c.front, c.server)
	wantFlow(t, events[1], proto, c.client, c.front, ap(p.far2, 8080))
}

func (n *eventNode) eventsOfSweep(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	swept := func(want ...string) {
		t.Helper()
		must.Do(t, n.flows.Sweep(context.Background()))
		events := n.flows.TakeSwept(nil)
		slices.SortFunc(events, func(a, b dataplane.FlowEvent) int { return cmp.Compare(a.Reason, b.Reason) })
		var have []string
		for _, e := range events {
			have = append(have, e.Reason)
			if e.Flow.PacketsToEndpoint == 0 && e.Reason == dataplane.EndTimeout {
				t.Errorf("no packets: %+v", e)
			}
			wantFlow(t, e, proto, ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080))
		}
		if !slices.Equal(have, want) {
			t.Fatalf("ends %q, want %q", have, want)
		}
	}
	swept()
	n.running(t, p, proto)
	n.events(t)
	swept()
	n.ageFlows(t, 48*3600)
	swept("timeout")
	swept()
	n.running(t, p, proto)
	n.events(t)
	swept()
	n.forget(t)
	swept()
	swept("evicted")
	swept()
	swept() // a flow that is left would be evicted now
}

// eventsOfDeletedService: its name is still known.
func (n *eventNode) eventsOfDeletedService(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	c := n.open(t, p, 40000)
	n.serve(t)
	c.talk(t, "R")
	for _, e := range n.want(t, "opened", "answered", "closed RST") {
		wantFlow(t, e, protoTCP, c.client, c.front, c.server)
	}
}

// A full ring loses events, and counts them.
func TestPacketEventsRingFull(t *testing.T) {
	n := newEventNode(t)
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP))
	f := frame{proto: protoTCP, src: ap(p.client, 1), dst: ap(p.clusterIP, 80), flags: "S"}
	const header = 8
	room := objects.EventsRing / (len(objects.Bytes(new(objects.TCEvent))) + header)
	more := 100
	n.enter(t)
	for range room + more {
		_, _, err := n.run(inEth0, f.bytes(n.packetNode, "eth0"), 0, 0)
		must.Do(t, err)
	}
	counts := n.FlowEventCounts()
	stored := len(n.events(t))
	if stored+int(counts.Lost) != room+more || counts.Lost == 0 {
		t.Errorf("%d stored, %d lost of %d", stored, counts.Lost, room+more)
	}
	n.run(inEth0, f.bytes(n.packetNode, "eth0"), 0, 0)
	n.want(t, "refused rejected_rst")
}

// A flood of one Service leaves the other its events.
func TestPacketEventsRate(t *testing.T) {
	const rate = 50
	n := newEventNode(t, func(c *Config) { c.FlowEventsRate = rate })
	p, other := plans["IPv4"], plans["IPv6"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP),
		service(other, protoTCP, endpoint(other.far, 8080, elsewhere)))
	n.enter(t)
	send := func(p *plan, proto uint8, port uint16) {
		f := frame{proto: proto, src: ap(p.client, port), dst: ap(p.clusterIP, 80), flags: first(proto)}
		_, _, err := n.run(inEth0, f.bytes(n.packetNode, "eth0"), 0, 0)
		must.Do(t, err)
	}
	const flood = 2000
	begun := time.Now()
	for i := range uint16(flood) {
		send(p, protoTCP, 10000+i)
		send(p, protoUDP, 10000+i)
	}
	// A token for each interval that has passed, and one for the coarse clock.
	most := rate + int(time.Since(begun)*rate/time.Second) + 1
	send(other, protoTCP, 10000)
	seen := map[string]int{}
	for _, e := range n.events(t) {
		seen[fmt.Sprint(e.Kind, e.Flow.Port.Service.Name, e.Flow.Client.Addr().Is6())]++
	}
	for _, key := range []string{"openedweb-6false", "refusedweb-17false"} {
		if seen[key] < rate || seen[key] > most {
			t.Errorf("%d events %s of %d, want %d to %d", seen[key], key, flood, rate, most)
		}
	}
	if seen["openedweb-6true"] != 1 {
		t.Errorf("events %v: none of the other Service", seen)
	}
	if left := n.FlowEventCounts().LeftOut; int(left) != 2*flood-seen["openedweb-6false"]-seen["refusedweb-17false"] {
		t.Errorf("%d left out, of %v", left, seen)
	}
}

// Flows are sampled, and refusals are not. A flow has all its events or none.
func TestPacketEventsSample(t *testing.T) {
	n := newEventNode(t, func(c *Config) { c.FlowEventsSample = 4 })
	n.checksComplete = false // see TestPacketAnswers
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP))
	const flows = 400
	for i := range uint16(flows) {
		n.open(t, p, 10000+i).talk(t, "R")
		n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, i), dst: ap(p.clusterIP, 80)})
	}
	seen := map[dataplane.FlowEventKind]int{}
	for _, e := range n.events(t) {
		seen[e.Kind]++
	}
	opened := seen[dataplane.FlowOpened]
	if opened < flows/16 || opened > flows/2 || seen[dataplane.FlowAnswered] != opened || seen[dataplane.FlowClosed] != opened {
		t.Errorf("events %v of %d flows", seen, flows)
	}
	if seen[dataplane.FlowRefused] != flows {
		t.Errorf("%d refusals, want %d", seen[dataplane.FlowRefused], flows)
	}
	if left := n.FlowEventCounts().LeftOut; int(left) != flows-opened {
		t.Errorf("%d left out, want %d", left, flows-opened)
	}
}

func TestPacketEventsOff(t *testing.T) {
	for _, mode := range []string{EventsOff, EventsRefused} {
		t.Run(mode, func(t *testing.T) {
			n := newEventNode(t, func(c *Config) { c.FlowEvents = mode })
			n.checksComplete = false
			p := plans["IPv4"]
			n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP))
			n.open(t, p, 40000).talk(t, "R")
			n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)})
			if mode == EventsOff {
				n.want(t)
				return
			}
			n.want(t, "refused rejected_icmp")
			// The agent has ended, and no program reads.
			must.Do(t, n.flows.StopEvents())
			n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)})
			n.want(t)
		})
	}
}

func TestPacketServiceMetrics(t *testing.T) {
	n := newEventNode(t, func(c *Config) { c.FlowEvents, c.ServiceMetrics, c.ServiceMetricsTop = EventsOff, true, 2 })
	n.checksComplete = false // see TestPacketAnswers
	ports := map[string]*intent.ServicePort{}
	for name, p := range plans {
		ports[name] = service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
		n.serve(t, slices.Collect(maps.Values(ports))...)
		for i := range uint16(3) {
			n.open(t, p, 40000+i).talk(t, "P.", "<P.")
		}
	}
	p := plans["IPv4"]
	empty, silent := service(p, protoUDP), service(plans["IPv6"], protoUDP)
	silent.ID.Service.Name = "silent"
	silent.Frontends = silent.Frontends[:1]
	n.serve(t, append(slices.Collect(maps.Values(ports)), empty, silent)...)
	for range 4 {
		n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)})
	}
	n.send(t, inEth0, frame{proto: protoUDP, src: ap(plans["IPv6"].client, 40000), dst: ap(plans["IPv6"].clusterIP, 80)})
	must.Do(t, n.flows.Sweep(t.Context()))

	registry := prometheus.NewPedanticRegistry()
	must.Do(t, registry.Register(n.flows))
	families, err := registry.Gather()
	must.Do(t, err)
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	must.Do(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	have := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "spillway_service_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			have[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	const web = " default 80 TCP web-6"
	bytes := float64(40 + 60) // of headers, in both families
	for name, want := range map[string]float64{
		"active_connections" + web: 6, "connections_total" + web: 6, "handshake_duration_seconds" + web: 6,
		"packets_total to_client" + web: 12, "packets_total to_endpoint" + web: 18,
		"bytes_total to_client" + web: 6 * bytes, "bytes_total to_endpoint" + web: 9 * bytes,
		"refused_total default 80 UDP rejected_icmp web-17": 4,
		"connections_total default 80 UDP web-17":           0,
		"metrics_omitted": 1,
	} {
		if got, there := have[name]; !there || got != want {
			t.Errorf("%s is %v (there: %t), want %v", name, got, there, want)
		}
	}
	if t.Failed() {
		t.Logf("%v", have)
	}
	all, err := n.ServiceCounters()
	must.Do(t, err)
	for id, want := range all {
		some, err := n.ServiceCountersOf([]intent.PortID{id})
		must.Do(t, err)
		if len(some) != 1 || !reflect.DeepEqual(some[id], want) {
			t.Errorf("counters of %s alone: %+v, want %+v", id, some, want)
		}
	}
	if some, err := n.ServiceCountersOf([]intent.PortID{{Port: "none"}}); err != nil || len(some) != 0 {
		t.Errorf("counters of a port that is not served: %v, %v", some, err)
	}
	answered, took := uint64(0), time.Duration(0)
	for _, c := range all {
		for _, v := range c.Handshakes {
			answered += v
		}
		took += c.HandshakeSum
	}
	if answered != 6 || took <= 0 {
		t.Errorf("%d handshakes of %s", answered, took)
	}
	// Counters go with their Service, when its name is forgotten.
	n.serve(t)
	next := flows.New(&n.cfg, n.objects, services.New(n.objects, n.cfg.Log)) // a run that knows no names of before
	must.Do(t, next.Sweep(t.Context()))
	for _, name := range []string{objects.TCMapServiceCounters, objects.TCMapServiceRefusals} {
		var key []byte
		if n.m(name).NextKey(nil, &key) == nil {
			t.Errorf("%s has an entry", name)
		}
	}
}

// TestPacketFullServiceCounters has the Services of a tenant fill the maps of counters. Others are
// served, and what is not counted is reported. When the Services are deleted, others are counted.
// Without packets and bytes, the counters of connections cost no packet of a known flow.
func TestPacketServiceConnections(t *testing.T) {
	n := newEventNode(t, func(c *Config) { c.FlowEvents, c.ServiceMetrics, c.ServiceConnectionsOnly = EventsOff, true, true })
	n.checksComplete = false // see TestPacketAnswers
	p := plans["IPv4"]
	web := service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
	n.serve(t, web, service(p, protoUDP))
	n.open(t, p, 40000).talk(t, "P.", "<P.")
	n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)})
	all, err := n.ServiceCounters()
	must.Do(t, err)
	c := all[web.ID]
	if c == nil || c.Connections != 1 || c.PacketsToEndpoint != 0 || !c.ConnectionsOnly {
		t.Errorf("counters %+v", c)
	}
	must.Do(t, objects.EachPerCPU(n.m(objects.TCMapServiceCounters), func(id uint32, perCPU []objects.TCServiceCounts) {
		for _, c := range perCPU {
			if c.Packets != [2]uint64{} {
				t.Errorf("the kernel counts packets of Service %d: %v", id, c.Packets)
			}
		}
	}))
	registry := prometheus.NewPedanticRegistry()
	must.Do(t, registry.Register(n.flows))
	families, err := registry.Gather()
	must.Do(t, err)
	have := map[string]uint64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			have[f.GetName()] += uint64(m.GetCounter().GetValue()) + m.GetHistogram().GetSampleCount()
		}
	}
	for name, want := range map[string]uint64{
		"spillway_service_connections_total": 1, "spillway_service_handshake_duration_seconds": 1, "spillway_service_refused_total": 1,
	} {
		if have[name] != want {
			t.Errorf("%s is %d, want %d", name, have[name], want)
		}
	}
	for _, none := range []string{"spillway_service_packets_total", "spillway_service_bytes_total"} {
		if _, exported := have[none]; exported {
			t.Errorf("%s is exported, and not counted", none)
		}
	}
}

func TestPacketFullServiceCounters(t *testing.T) {
	n := newEventNode(t, func(c *Config) { c.FlowEvents, c.ServiceMetrics = EventsOff, true })
	n.checksComplete = false // see TestPacketAnswers
	counters, refusals := n.m(objects.TCMapServiceCounters), n.m(objects.TCMapServiceRefusals)
	const theirs = 1 << 30 // ids of the tenant's Services, whose names are forgotten after their deletion
	for i := range counters.MaxEntries() {
		// The kernel allocates memory of CPUs in batches, and refuses entries meanwhile.
		await.NoError(t, func() error { return counters.Put(theirs+i, make([]objects.TCServiceCounts, ebpf.MustPossibleCPU())) })
	}
	for i := range refusals.MaxEntries() {
		key := objects.TCRefusalKey{Service: theirs + i, Verdict: uint32(objects.TCVerdictREJECTED_RST)}
		await.NoError(t, func() error { return refusals.Put(key, make([]uint64, ebpf.MustPossibleCPU())) })
	}
	p := plans["IPv4"]
	web, empty := service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP)
	n.serve(t, web, empty)
	ask := func(port uint16) {
		t.Helper()
		n.open(t, p, port).talk(t, "P.", "<P.")
		n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, port), dst: ap(p.clusterIP, 80)})
	}
	counted := func() (connections, refused uint64) {
		t.Helper()
		all, err := n.ServiceCounters()
		must.Do(t, err)
		if c := all[web.ID]; c != nil {
			connections = c.Connections
		}
		if c := all[empty.ID]; c != nil {
			refused = c.Refused["rejected_icmp"]
		}
		return connections, refused
	}
	uncounted := func() uint64 {
		return objects.SumPerCPU(n.m(objects.TCMapEventCounts), int(objects.TCEventCountEVENT_COUNTS))[objects.TCEventCountSERVICES_UNCOUNTED]
	}
	ask(40000)
	if connections, refused := counted(); connections != 0 || refused != 0 || uncounted() < 2 {
		t.Errorf("%d connections and %d refusals are counted, %d are reported as not counted; want none and all",
			connections, refused, uncounted())
	}
	must.Do(t, n.flows.Sweep(t.Context()))
	before := uncounted()
	ask(40001)
	if connections, refused := counted(); connections != 1 || refused != 1 || uncounted() != before {
		t.Errorf("%d connections and %d refusals are counted when there is room, %d more are not; want one each", connections,
			refused, uncounted()-before)
	}
}
