package connectivity

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// Cases are the names of the rows, in their order.
const (
	podAddress     = "Pod address, headless Service"
	clusterIP      = "ClusterIP"
	unconnected    = "ClusterIP, unconnected UDP socket"
	sameNode       = "Endpoint on the client's node"
	otherNode      = "Endpoint on another node"
	fullPacket     = "UDP, a full packet, other node"
	fragments      = "UDP, fragmented, other node"
	hairpin        = "Pod to itself (hairpin)"
	nodePort       = "NodePort on each node"
	externalLocal  = "externalTrafficPolicy: Local"
	internalLocal  = "internalTrafficPolicy: Local"
	affinity       = "sessionAffinity: ClientIP"
	noEndpoints    = "No endpoints: refused"
	loadBalancer   = "Load balancer address"
	sourceAllowed  = "Source range that has the client"
	sourceExcluded = "Source range without the client"
)

// Cases lists the rows in their order.
var Cases = []string{
	podAddress, clusterIP, unconnected, sameNode, otherNode, fullPacket, fragments, hairpin, nodePort,
	externalLocal, internalLocal, affinity, noEndpoints, loadBalancer, sourceAllowed, sourceExcluded,
}

// fragmentedSize needs several packets on every device with a usual MTU.
const fragmentedSize = 4000

// Names of the Services. Each server and each client on the pod network has one more, of its
// own name.
const (
	allService           = "all"
	headlessService      = "headless"
	nodePortService      = "node-port"
	externalLocalService = "external-local"
	internalLocalService = "internal-local"
	affinityService      = "affinity"
	emptyService         = "no-endpoints"
	balancerService      = "load-balancer"
	allowedService       = "source-allowed"
	excludedService      = "source-excluded"
)

// foreignRanges are source ranges without any client: addresses for documents.
var foreignRanges = []string{"192.0.2.1/32", "2001:db8::1/128"}

// balancerAddresses are the addresses that a load balancer would have given, for documents
// as well: one of each family.
var balancerAddresses = map[string][2]netip.Addr{
	balancerService: {netip.MustParseAddr("198.51.100.241"), netip.MustParseAddr("2001:db8:51::241")},
	allowedService:  {netip.MustParseAddr("198.51.100.242"), netip.MustParseAddr("2001:db8:51::242")},
	excludedService: {netip.MustParseAddr("198.51.100.243"), netip.MustParseAddr("2001:db8:51::243")},
}

// serviceSpecs returns the specifications of all Services but those of single Pods.
func serviceSpecs() map[string]corev1.ServiceSpec {
	servers := map[string]string{roleLabel: roleServer}
	first := map[string]string{nameLabel: serverName(0)}
	balancer := func(selector map[string]string, ranges []string) corev1.ServiceSpec {
		return corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: selector, LoadBalancerSourceRanges: ranges,
			// A class that no controller serves: so none of them gives out an address.
			LoadBalancerClass: ptr.To("spillway.dev/connectivity-test"),
		}
	}
	return map[string]corev1.ServiceSpec{
		allService:      {Selector: servers},
		headlessService: {Selector: servers, ClusterIP: corev1.ClusterIPNone},
		nodePortService: {Selector: servers, Type: corev1.ServiceTypeNodePort},
		externalLocalService: {
			Selector: first, Type: corev1.ServiceTypeNodePort, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
		},
		internalLocalService: {Selector: first, InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyLocal)},
		affinityService:      {Selector: servers, SessionAffinity: corev1.ServiceAffinityClientIP},
		emptyService:         {Selector: map[string]string{nameLabel: "nothing"}, Type: corev1.ServiceTypeNodePort},
		balancerService:      balancer(servers, nil),
		allowedService:       balancer(servers, foreignRanges),
		excludedService:      balancer(servers, foreignRanges),
	}
}

// target is one Node of the test, with its addresses and its server's.
type target struct {
	node    string
	server  string // name of the server's Pod
	addrs   []netip.Addr
	podIPs  []netip.Addr
	service []netip.Addr // cluster IPs of the server's own Service
}

// client is one client: on the pod network, or on the network of its Node.
type client struct {
	name        string
	node        int // index in world.targets
	hostNetwork bool
	service     []netip.Addr // cluster IPs of its own Service; none on the host network
}

// world is all that plans need to know of the cluster.
type world struct {
	targets   []target
	clusterIP map[string][]netip.Addr
	nodePort  map[string]uint16 // the same for TCP and UDP
	balancers bool              // load balancer addresses could be set
}

// families returns the families that a client and a server share: whether it is IPv6.
func families(addrs []netip.Addr) (list []bool) {
	for _, v6 := range []bool{false, true} {
		if slices.ContainsFunc(addrs, func(a netip.Addr) bool { return a.Is6() == v6 }) {
			list = append(list, v6)
		}
	}
	return list
}

// asker collects the questions of one client.
type asker struct {
	asks []Ask
	// families of the client's own addresses: true is IPv6.
	families []bool
}

// add adds the question over TCP and UDP for each address in a family of the client.
func (q *asker) add(addrs []netip.Addr, port uint16, ask Ask) {
	for _, addr := range addrs {
		if !slices.Contains(q.families, addr.Is6()) {
			continue
		}
		ask.To = netip.AddrPortFrom(addr, port)
		for _, proto := range []string{"tcp", "udp"} {
			if proto == "tcp" && (ask.Unconnected || ask.Size != 0) {
				continue
			}
			ask.Proto = proto
			q.asks = append(q.asks, ask)
		}
	}
}

// plan returns the questions of a client.
func (w *world) plan(c client) Plan {
	own := w.targets[c.node]
	q := &asker{families: families(own.podIPs)}
	var all []string
	for _, t := range w.targets {
		all = append(all, t.server)
	}
	for i, t := range w.targets {
		one := []string{t.server}
		q.add(t.podIPs, Port, Ask{Case: podAddress, Expect: Answer, Servers: one})
		if i == c.node {
			q.add(t.service, servicePort, Ask{Case: sameNode, Expect: Answer, Servers: one})
			continue
		}
		q.add(t.service, servicePort, Ask{Case: otherNode, Expect: Answer, Servers: one})
		if !c.hostNetwork {
			q.add(t.service, servicePort, Ask{Case: fullPacket, Expect: Answer, Servers: one, Size: mtuSize})
			q.add(t.service, servicePort, Ask{Case: fragments, Expect: Answer, Servers: one, Size: fragmentedSize})
		}
	}
	q.add(w.clusterIP[allService], servicePort, Ask{Case: clusterIP, Expect: Spread, Servers: all})
	q.add(w.clusterIP[allService], servicePort, Ask{Case: unconnected, Expect: Spread, Servers: all, Unconnected: true})
	q.add(w.clusterIP[affinityService], servicePort, Ask{Case: affinity, Expect: Sticky, Servers: all})
	q.add(w.clusterIP[emptyService], servicePort, Ask{Case: noEndpoints, Expect: Refused})
	q.add(own.addrs, w.nodePort[emptyService], Ask{Case: noEndpoints, Expect: Refused})
	for _, t := range w.targets {
		q.add(t.addrs, w.nodePort[nodePortService], Ask{Case: nodePort, Expect: Spread, Servers: all})
	}
	w.addLocal(q, c)
	q.add(c.service, servicePort, Ask{Case: hairpin, Expect: Answer, Servers: []string{c.name}})
	w.addBalancers(q, c, all)
	plan := Plan{Asks: q.asks}
	if !c.hostNetwork {
		plan.Serve = c.name
	}
	return plan
}

// addLocal adds the questions about traffic policies. Their only endpoint is on the first
// node.
func (w *world) addLocal(q *asker, c client) {
	first := []string{w.targets[0].server}
	port := w.nodePort[externalLocalService]
	ask := Ask{Case: externalLocal, Expect: Answer, Servers: first}
	q.add(w.targets[0].addrs, port, ask)
	if c.node != 0 {
		// A client on the node itself is inside and reaches all endpoints.
		q.add(w.targets[c.node].addrs, port, ask)
	}
	if c.hostNetwork && len(w.targets) > 1 {
		// A packet from another node comes from outside. That of a Pod may count as inside,
		// where the CNI leaves its address.
		for i, t := range w.targets[1:] {
			if i+1 != c.node {
				q.add(t.addrs, port, Ask{Case: externalLocal, Expect: Dropped})
			}
		}
	}
	internal := Ask{Case: internalLocal, Expect: Answer, Servers: first}
	if c.node != 0 {
		internal = Ask{Case: internalLocal, Expect: Dropped}
	}
	q.add(w.clusterIP[internalLocalService], servicePort, internal)
}

// addBalancers adds the questions about load balancer addresses. Source ranges are for Pods
// alone: a node may have several addresses.
func (w *world) addBalancers(q *asker, c client, all []string) {
	if !w.balancers {
		return
	}
	addrs := func(service string) []netip.Addr {
		var list []netip.Addr
		for _, a := range balancerAddresses[service] {
			if slices.Contains(families(w.clusterIP[service]), a.Is6()) {
				list = append(list, a)
			}
		}
		return list
	}
	q.add(addrs(balancerService), servicePort, Ask{Case: loadBalancer, Expect: Spread, Servers: all})
	if c.hostNetwork {
		return
	}
	q.add(addrs(allowedService), servicePort, Ask{Case: sourceAllowed, Expect: Spread, Servers: all, Patient: true})
	q.add(addrs(excludedService), servicePort, Ask{Case: sourceExcluded, Expect: Dropped})
}

// serverName names the server of a Node.
func serverName(i int) string { return fmt.Sprintf("server-%d", i) }
