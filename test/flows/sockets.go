package flows

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// A change of objects and live sockets. The expected values are kube-proxy's:
//
//	TCP, open    stays with its endpoint, whatever changes
//	UDP          stays with an endpoint that serves its Service, selected or not (conntrack/cleanup.go);
//	             goes to the Service that has the address, or to none
//
// Those of TCP handshakes without an answer are not: kube-proxy leaves their conntrack entries, see
// docs/adr/0012-stale-entries.md. Where new connections no longer get their endpoint, the next SYN is like
// the first one of a new connection.
//
// socketChanges are the rows, and sockets the columns.

// state is a state of the objects: what a live socket gets, and new ones.
type state struct {
	name    string
	objects []Object
	of      string // the Service that has the address; "" is the first
	port    string // its port, by the suffix of the name
	udp     string // the server of live UDP sockets; "" is none
	tcp     string // of open connections
	shake   string // of handshakes that the endpoint of the first state has not answered; "" is none
	stays   string // the node through which they stay with it all the same
	fresh   []Flow
}

// socketChange is a change of one address.
type socketChange struct {
	name      string
	at        TargetKind // of the address, see liveTarget
	filesOnly string
	shake     int  // the state that follows at once while a handshake waits; 0 is 1
	shared    bool // after the change, the endpoint is still one of another port
	states    []state
}

// socketCases are all changes, each with all kinds of sockets.
func socketCases() []Case {
	var cases []Case
	for _, change := range socketChanges() {
		c, moved := Case{Name: "Live sockets: " + change.name, FilesOnly: change.filesOnly}, false
		for i, s := range change.states {
			moved = moved || s.udp != change.states[0].udp
			list := append(s.live(change.at, moved), s.fresh...)
			if i == 0 {
				c.Objects, c.Flows = s.objects, list
				continue
			}
			c.Then = append(c.Then, Step{Name: s.name, Objects: s.objects, Flows: list})
		}
		cases = append(cases, c)
	}
	return cases
}

// sockets are the kinds of live sockets: connected UDP, UDP that never connects, and TCP. The suite
// adds those of a pod's process that no socket hook sees.
func sockets() []Flow {
	var list []Flow
	for _, from := range []string{"client0", "a1", "c1", "a", "c"} {
		list = append(list,
			Flow{From: from, Only: TCP, Keep: "tcp"},
			Flow{From: from, Only: UDP, Keep: "connected"},
			Flow{From: from, Only: UDP, Keep: "unconnected", Unconnected: true},
		)
	}
	return list
}

// live returns the flows of the live sockets. A connected UDP socket of a node's own process moves to
// no other endpoint with eBPF: docs/reference/limits.md.
func (s state) live(at TargetKind, moved bool) []Flow {
	var list []Flow
	for _, f := range sockets() {
		if moved && s.udp != "" && f.Keep == "connected" && len(f.From) == 1 {
			continue
		}
		server := s.tcp
		if f.Only[0] == UDP4 {
			server = s.udp
		}
		kind := f.Keep
		for _, to := range liveTargets(at, f.From) {
			f.Keep = kind + to.Node
			f.To = to.Of(s.of)
			if s.port != "" {
				f.To = f.To.At(f.Only[0].Protocol() + s.port)
			}
			source := AnySource
			if f.From == "client0" {
				source = KeptHere
			}
			f.Want = Unserved
			if server != "" {
				f.Want = OneOf(source, server)
			}
			list = append(list, f)
		}
	}
	return list
}

// liveTargets returns the addresses that a client asks: the changed one, and for ClusterIPs those that
// clients outside have instead, through two nodes.
func liveTargets(at TargetKind, from string) []Target {
	switch outside := from == "client0"; {
	case at == ToExternalIP:
		return []Target{ExternalIP("a")}
	case at == ToLoadBalancer:
		return []Target{LoadBalancer("a")}
	case at == ToNodePort && !outside:
		return []Target{NodePort(from[:1])}
	case at == ToAddress || !outside:
		return []Target{ClusterIP}
	}
	return []Target{NodePort("a"), NodePort("b")}
}

// HandshakeChange is a change of objects while TCP handshakes wait for their endpoint's answer.
type HandshakeChange struct {
	Name      string
	FilesOnly string   // as in Case
	Before    []Object // the handshakes begin
	After     []Object
	Flows     []Flow // the clients
	Old       string // the pod that does not answer on HandshakePort
	New       string // the server that the next SYN gets; "" is none
	Shared    bool   // Old is still an endpoint of another port
}

// Stays reports whether the next SYN goes where the first one went.
func (h HandshakeChange) Stays() bool { return h.New == onHandshakePort(h.Old) }

// HandshakePort is that of the endpoints of HandshakeChanges. The Services by which the suite sees what
// nodes serve have 8080.
const HandshakePort = 8081

// handshakePorts are the ports of the endpoints, by those of the changes.
var handshakePorts = map[int32]int32{8080: HandshakePort, 8081: 8090}

// onHandshakePorts returns objects whose endpoints have other ports.
func onHandshakePorts(objects []Object) []Object {
	var list []Object
	for _, o := range objects {
		if s, ok := o.(Service); ok {
			s.Ports = slices.Clone(s.ports())
			for i := range s.Ports {
				s.Ports[i].Target = handshakePorts[s.Ports[i].Target]
			}
			o = s
		}
		list = append(list, o)
	}
	return list
}

// onHandshakePort returns the name of a server on the other port.
func onHandshakePort(server string) string {
	pod, _, named := strings.Cut(server, ":")
	switch {
	case server == "":
		return ""
	case named:
		return pod + ":8090"
	}
	return fmt.Sprint(pod, ":", HandshakePort)
}

// HandshakeChanges are all changes, each in one step: a SYN between two would get what a new connection gets there.
func HandshakeChanges() []HandshakeChange {
	var list []HandshakeChange
	for _, change := range socketChanges() {
		first, last := change.states[0], change.states[max(change.shake, 1)]
		h := HandshakeChange{
			Name: change.name, FilesOnly: change.filesOnly, Old: first.tcp, Shared: change.shared,
			Before: onHandshakePorts(first.objects), After: onHandshakePorts(last.objects),
		}
		staying := h
		staying.Name += ", through node " + last.stays
		staying.New, h.New = onHandshakePort(first.tcp), onHandshakePort(last.shake)
		for _, f := range first.live(change.at, false) {
			if f.Keep[:3] != "tcp" {
				continue
			}
			to := &h
			if through := cmp.Or(f.To.Node, f.From[:1]); through == last.stays {
				to = &staying
			}
			to.Flows = append(to.Flows, Flow{From: f.From, To: f.To, Only: f.Only})
		}
		list = append(list, h)
		if len(staying.Flows) > 0 {
			list = append(list, staying)
		}
	}
	return list
}

// socketChanges are the changes.
func socketChanges() []socketChange {
	np := func(endpoints ...Endpoint) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: endpoints}}
	}
	local := Service{Type: corev1.ServiceTypeNodePort, ExternalLocal: true, InternalLocal: true, Endpoints: On("b0")}
	hints := Service{Type: corev1.ServiceTypeNodePort, Distribution: "PreferClose", Endpoints: []Endpoint{
		{On: "a0", Zones: []string{"west"}}, {On: "c0", Zones: []string{"east"}},
	}}
	lb := Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: On("a0")}
	restricted := lb
	restricted.AllowFrom = []string{"client1"}
	sticky := func(endpoints ...Endpoint) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, Affinity: long, Endpoints: endpoints}}
	}
	return append(addressChanges(), []socketChange{
		{name: "the endpoint is removed, another comes", at: ToClusterIP, states: []state{
			{objects: np(On("a0")...), udp: "a0", tcp: "a0"},
			{name: "b0 instead", objects: np(On("b0")...), udp: "b0", tcp: "a0", shake: "b0", fresh: onlyServers("b0")},
			{name: "c0 instead", objects: np(On("c0")...), udp: "c0", tcp: "a0"},
			{name: "a0 again", objects: np(On("a0")...), udp: "a0", tcp: "a0"},
		}},
		{name: "the endpoint terminates and serves", at: ToClusterIP, states: []state{
			{objects: np(On("a0")...), udp: "a0", tcp: "a0"},
			{name: "terminating", objects: np(append(On("b0"), Terminating("a0")...)...), udp: "a0", tcp: "a0", shake: "b0",
				fresh: onlyServers("b0")},
			{name: "removed", objects: np(On("b0")...), udp: "b0", tcp: "a0"},
		}},
		{name: "the endpoint terminates and serves, with session affinity", at: ToClusterIP, states: []state{
			{objects: sticky(On("a0")...), udp: "a0", tcp: "a0"},
			{name: "terminating", objects: sticky(append(On("b0"), Terminating("a0")...)...), udp: "a0", tcp: "a0", shake: "b0",
				fresh: onlyServers("b0")},
		}},
		{name: "source ranges leave the client out", at: ToLoadBalancer, states: []state{
			{objects: []Object{lb}, udp: "a0", tcp: "a0"},
			{name: "restricted", objects: []Object{restricted}, udp: "a0", tcp: "a0", shake: "a0",
				fresh: []Flow{{From: "client0", To: LoadBalancer("a"), Want: Drop}}},
		}},
		{name: "hints leave the endpoint out", at: ToClusterIP, states: []state{
			{objects: np(On("a0")...), udp: "a0", tcp: "a0"},
			{name: "with hints", objects: []Object{hints}, udp: "a0", tcp: "a0", shake: "c0", stays: "b", fresh: onlyServers("c0")},
			{name: "without hints", objects: np(On("a0", "c0")...), udp: "a0", tcp: "a0"},
		}},
		{name: "both policies turn Local", at: ToClusterIP, states: []state{
			{objects: np(On("b0")...), udp: "b0", tcp: "b0"},
			// Traffic of a node's pods to a NodePort has no policy, so b0 gets new connections of each node.
			{name: "Local", objects: []Object{local}, udp: "b0", tcp: "b0", shake: "b0", fresh: []Flow{
				{From: "client0", To: NodePort("a"), Want: Drop}, {From: "a1", To: ClusterIP, Want: Drop}, {From: "c", To: ClusterIP, Want: Drop},
			}},
			{name: "Cluster", objects: np(On("b0", "c0")...), udp: "b0", tcp: "b0"},
		}},
		{name: "endpoints come", at: ToClusterIP, states: []state{
			{objects: np(On("a0")...), udp: "a0", tcp: "a0"},
			{name: "three", objects: np(On(all...)...), udp: "a0", tcp: "a0", shake: "a0", fresh: onlyServers(all...)},
		}},
	}...)
}

// addressChanges are the changes after which another Service has the address, or none.
func addressChanges() []socketChange {
	np := func(name, ports string, endpoints ...string) Service {
		return Service{Name: name, Type: corev1.ServiceTypeNodePort, SharePort: ports, Endpoints: On(endpoints...)}
	}
	external := func(name string, via []string, endpoints ...string) Service {
		return Service{Name: name, Via: via, ShareVia: "first", Endpoints: On(endpoints...)}
	}
	ports := func(x, y int32) []Object {
		return []Object{Service{Endpoints: On("a0"), Ports: []Port{
			{Name: "tcp-x", Protocol: tcp, Port: x, Target: 8080}, {Name: "udp-x", Protocol: udp, Port: x, Target: 8080},
			{Name: "tcp-y", Protocol: tcp, Port: y, Target: 8081}, {Name: "udp-y", Protocol: udp, Port: y, Target: 8081},
		}}}
	}
	again := Service{Name: "again", Type: corev1.ServiceTypeNodePort, ShareIP: "web", SharePort: "web", Endpoints: On("c0")}
	// A pod that another Service has, too, stays an endpoint.
	other := Service{Name: "other", Endpoints: On("a0")}
	return []socketChange{
		{name: "two Services swap their NodePorts", at: ToNodePort, filesOnly: "an API server gives a NodePort to one Service", states: []state{
			{objects: []Object{np("first", "", "a0"), np("second", "", "b0")}, of: "first", udp: "a0", tcp: "a0"},
			{name: "swapped", objects: []Object{np("first", "second", "a0"), np("second", "first", "b0")}, of: "second", udp: "b0", tcp: "a0",
				shake: "a0"},
			{name: "swapped back", objects: []Object{np("first", "", "a0"), np("second", "", "b0")}, of: "first", udp: "a0", tcp: "a0"},
		}},
		{name: "an external IP moves to another Service", at: ToExternalIP, states: []state{
			{objects: []Object{external("first", []string{"a"}, "a0"), external("second", nil, "b0")}, of: "first", udp: "a0", tcp: "a0"},
			{name: "moved", objects: []Object{external("first", nil, "a0"), external("second", []string{"a"}, "b0")},
				of: "second", udp: "b0", tcp: "a0", shake: "a0"},
			{name: "moved back", objects: []Object{external("first", []string{"a"}, "a0"), external("second", nil, "b0")},
				of: "first", udp: "a0", tcp: "a0"},
		}},
		{name: "two ports of a Service swap their numbers", at: ToAddress, shared: true, states: []state{
			{objects: ports(80, 81), port: "-x", udp: "a0", tcp: "a0"},
			{name: "swapped", objects: ports(81, 80), port: "-y", udp: "a0:8081", tcp: "a0", shake: "a0:8081"},
		}},
		{name: "the Service is deleted, its pod stays", at: ToClusterIP, shared: true, states: []state{
			{objects: []Object{np("web", "", "a0"), other}, udp: "a0", tcp: "a0"},
			{name: "deleted", objects: append(gone("web"), other), udp: "", tcp: "a0"},
			{name: "back", objects: []Object{np("web", "", "b0"), other}, udp: "b0", tcp: "a0"},
		}},
		{name: "the Service is deleted, and made again with another name", at: ToClusterIP,
			filesOnly: "its addresses are given by the API server", shake: 2, states: []state{
				{objects: []Object{np("web", "", "a0")}, udp: "a0", tcp: "a0"},
				{name: "deleted", objects: gone("web"), udp: "", tcp: "a0"},
				{name: "made again", objects: []Object{again}, of: "again", udp: "c0", tcp: "a0", shake: "c0"},
			}},
	}
}
