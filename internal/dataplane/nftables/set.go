package nftables

import (
	"fmt"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// set is a set or map of the table of Services. It exists while it has elements, so that a
// table shows what is in use.
type set struct {
	nft.Set
	with   []*set // exists while one of these does, instead
	always bool   // exists even while it is empty
	shared bool   // several owners may add one element; it stays until the last is gone
}

// elem is an element and its set.
type elem struct {
	set *set
	key string
	nft.Value
}

// classes are the sizes of slot maps. A packet looks up a random one of so many
// slots; a slot that no endpoint has is tried again.
var classes = []int{4, 16, 64, 256, 1024, 4096, 16384, 65536}

// classFor is the index in classes for so many endpoints.
func classFor(endpoints int) (int, error) {
	for i, c := range classes {
		if endpoints <= c {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%d endpoints are more than the %d that a port may have", endpoints, classes[len(classes)-1])
}

// pool holds endpoints of frontends, found by frontend and slot.
type pool struct {
	name  string // of the chain that chooses
	one   *set   // frontend -> its only endpoint
	class []class
	drop  *set // frontends whose packets are dropped
	valid *set // frontend . number of an endpoint -> endpoint, with affinity
}

// class is the slot map of one size, and the frontends that are in it.
type class struct {
	size    int
	members *set
	slots   *set
}

// base is one kind of lookup of frontends: by address, protocol and port, or by
// protocol and port on the node's own addresses; in one family.
type base struct {
	family     *nft.IP
	nodePort   bool
	name       string
	frontends  *set                   // all of them, with their names
	counters   *set                   // all of them, each with a counter of its connections
	external   *set                   // frontends with another route for external packets
	ranges     *set                   // frontends with source ranges
	sources    *set                   // frontend . source range
	masquerade *set                   // frontends whose packets get the node's address
	timeouts   map[time.Duration]*set // of affinity: frontend -> number of the Service port
	withHelper map[intent.Helper]*set // frontends whose connections have a helper
	own        *set                   // frontend . endpoint, of Services that speak FTP
	inner      pool                   // for internal packets, and all others unless in external
	outer      pool                   // for external packets
}

// common are the sets of one family that are not about frontends.
type common struct {
	family        *nft.IP
	nodePortAddrs *set
	clusterIPs    *set
	hairpin       *set
	localPods     *set
	clients       *set // client . number of a Service port -> number of an endpoint
	// endpointsWithHelper are the addresses of endpoints of this node whose connections
	// have a helper.
	endpointsWithHelper *set
	// ftpEndpoints are the addresses and ports of FTP endpoints on any node.
	ftpEndpoints *set
	ftpBlock     *set // client . endpoint, or endpoint . client: the FTP block
	handshakes   handshakeSets
	egress       egressSets
}

// layout holds every set that the table can have. The sets of affinity timeouts are added
// with their first Service port.
type layout struct {
	common    [2]common // IPv4, IPv6
	addresses [2]base
	nodePorts [2]base
	sets      []*set
	counting  bool // see Config.ServiceCounters
	beside    bool // see Config.Beside
	helpers   []*helper
}

func newLayout() *layout {
	l := &layout{}
	for i, f := range families {
		addr := nft.AddrField(f)
		l.common[i] = common{
			family:        f,
			nodePortAddrs: l.always("nodeport-addrs"+f.Suffix, "the node's addresses that serve NodePorts", addr),
			clusterIPs:    l.always("cluster-ips"+f.Suffix, "refused on ports that no Service has", addr),
			hairpin:       l.always("hairpin"+f.Suffix, "endpoints here that may reach themselves", addr, addr),
			localPods:     l.always("local-pods"+f.Suffix, "this node's pods", addr),
		}
		c := &l.common[i]
		c.clusterIPs.shared, c.hairpin.shared = true, true
		c.localPods.Interval = true
		c.clients = l.newClients(f)
		c.handshakes = l.handshakeSets(f)
		c.egress = l.egressSets(f)
		l.addresses[i] = l.base(f, "services"+f.Suffix, "addresses and ports of Services", addr, nft.ProtocolField, nft.PortField)
		l.nodePorts[i] = l.base(f, "nodeports"+f.Suffix, "NodePorts of Services", nft.ProtocolField, nft.PortField)
		l.nodePorts[i].nodePort = true
	}
	l.newHelpers()
	return l
}

func (l *layout) add(of nft.Set) *set {
	s := &set{Set: of}
	l.sets = append(l.sets, s)
	return s
}

func (l *layout) shared(of nft.Set) *set {
	s := l.add(of)
	s.shared = true
	return s
}

func (l *layout) always(name, comment string, key ...nft.Field) *set {
	s := l.add(nft.Set{Name: name, Comment: comment, Key: key})
	s.always = true
	return s
}

func (l *layout) base(f *nft.IP, name, comment string, key ...nft.Field) base {
	b := base{family: f, name: name, frontends: l.always(name, comment, key...)}
	b.counters = l.add(nft.Set{Name: name + "-counters", Key: key, Counted: true, Comment: "connections, and bytes of their first packets"})
	b.external = l.add(nft.Set{Name: name + "-outside", Key: key, Comment: "with endpoints of their own for packets from outside"})
	b.ranges = l.add(nft.Set{Name: name + "-ranges", Key: key, Comment: "with loadBalancerSourceRanges"})
	b.sources = l.add(nft.Set{Name: name + "-sources", Key: append(key[:len(key):len(key)], nft.AddrField(f)), Interval: true,
		Comment: "who may ask them"})
	b.masquerade = l.add(nft.Set{Name: name + "-masquerade", Key: key, Comment: "whose packets get the node's address"})
	b.timeouts = map[time.Duration]*set{}
	b.inner = l.pool(f, name, key)
	b.outer = l.pool(f, name+"-outside", key)
	return b
}

func (l *layout) pool(f *nft.IP, name string, key []nft.Field) pool {
	endpoint := []nft.Field{nft.AddrField(f), nft.PortField}
	p := pool{name: name}
	p.one = l.add(nft.Set{Name: name + "-1", Key: key, Data: endpoint, Comment: "of one endpoint"})
	for _, n := range classes {
		p.class = append(p.class, class{
			size:    n,
			members: l.add(nft.Set{Name: fmt.Sprintf("%s-upto-%d", name, n), Key: key}),
			slots: l.add(nft.Set{
				Name: fmt.Sprintf("%s-%d", name, n), Data: endpoint, Typeof: true,
				Key: append(key[:len(key):len(key)], nft.RandomField(uint32(n))),
			}),
		})
	}
	p.drop = l.add(nft.Set{Name: name + "-drop", Key: key, Comment: "without an endpoint here"})
	p.valid = l.add(nft.Set{
		Name: name + "-affinity", Key: append(key[:len(key):len(key)], nft.PriorityField), Data: endpoint, Typeof: true,
		Comment: "what the numbers of endpoints mean",
	})
	return p
}

func (l *layout) commonOf(f *nft.IP) *common {
	if f == nft.IPv6 {
		return &l.common[1]
	}
	return &l.common[0]
}

func (l *layout) bases() []*base {
	return []*base{&l.addresses[0], &l.addresses[1], &l.nodePorts[0], &l.nodePorts[1]}
}
