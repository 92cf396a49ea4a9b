package nftables

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
)

// field is one part of a set's key or of a map's values.
type field struct {
	typ    uint32 // nft's number for the type
	size   uint32 // bytes, without padding
	typeof udata  // nft's description of an expression that has this type
}

// nft's numbers of types (include/datatype.h) and of expressions
// (include/expression.h), as they are in user data.
const (
	typeInteger, typeProto, typeService = 4, 12, 13
	typeClass                           = 23
	exprPayload, exprMeta               = 7, 9
	exprConcat, exprNumgen              = 13, 23
	headerTransport, fieldDestPort      = 11, 2
)

// describe writes an expression of nft's: its kind, and two or three numbers.
func describe(kind uint32, numbers ...uint32) udata {
	var inner, u udata
	for i, n := range numbers {
		inner.u32(byte(i), n)
	}
	u.u32(0, kind)
	u.add(1, inner)
	return u
}

func addrField(f *family) field {
	return field{f.addrType, f.size, describe(exprPayload, f.header, f.daddrField)}
}

var (
	protoField = field{typeProto, 1, describe(exprMeta, unix.NFT_META_L4PROTO)}
	portField  = field{typeService, 2, describe(exprPayload, headerTransport, fieldDestPort)}
)

// numberField is the number of an endpoint or of a Service port, as a packet carries it.
var numberField = field{typeClass, 4, describe(exprMeta, unix.NFT_META_PRIORITY)}

func slotField(modulus uint32) field {
	return field{typeInteger, 4, describe(exprNumgen, unix.NFT_NG_RANDOM, modulus, 0)}
}

// set is a set or map of the table. Those of a base exist while they hold
// something, so that a table shows what is in use.
type set struct {
	name    string
	comment string
	key     []field
	data    []field // of a map
	verdict bool    // a map that says where to jump
	// interval sets hold ranges; those of one field are written anew as a whole.
	interval bool
	size     uint32 // of a map that packets fill, not the agent
	with     []*set // exists while one of these does
	always   bool   // exists even while it is empty
	shared   bool   // several owners may add one element; it stays till the last is gone
	typeof   bool   // the key has a field that no "type" can name
	counted  bool   // each element counts the packets that found it
	expires  bool   // each element goes when its time is up
}

func (s *set) isMap() bool   { return len(s.data) > 0 || s.verdict }
func (s *set) dynamic() bool { return s.size > 0 }

// whole says that a change writes all elements anew: ranges of one field are a
// tree of borders, where taking out one and putting in its neighbor may be
// refused half-way.
func (s *set) whole() bool { return s.interval && len(s.key) == 1 }

func (s *set) flags() uint32 {
	var f uint32
	if s.isMap() {
		f |= unix.NFT_SET_MAP
	}
	if s.interval {
		f |= unix.NFT_SET_INTERVAL
	}
	if s.interval && len(s.key) > 1 {
		f |= nftSetConcat
	}
	if s.expires {
		f |= unix.NFT_SET_TIMEOUT
	}
	if s.dynamic() {
		f |= unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL
	}
	return f
}

const (
	nftSetConcat  = 0x80
	setDescConcat = 2 // NFTA_SET_DESC_CONCAT
	setFieldLen   = 1 // NFTA_SET_FIELD_LEN
	setElemKeyEnd = 10
	setExpr       = 17 // NFTA_SET_EXPR; counters since Linux 5.7
	intervalEnd   = unix.NFT_SET_ELEM_INTERVAL_END
)

// sizeOf is the length of fields in registers, typeOf nft's number for them.
func sizeOf(fields []field) (n uint32) {
	for _, f := range fields {
		n += (f.size + 3) &^ 3
	}
	return n
}

func typeOf(fields []field) (t uint32) {
	for _, f := range fields {
		t = t<<6 | f.typ
	}
	return t
}

// Types of user data of sets and their elements (libnftnl's udata.h).
const (
	udataKeyByteOrder, udataDataByteOrder = 0, 1
	udataKeyTypeof, udataDataTypeof       = 3, 4
	udataSetComment                       = 7
	udataElemComment                      = 0
)

// userData tells nft how to show the set.
func (s *set) userData() udata {
	const host, network = 1, 2
	var u udata
	switch {
	case len(s.key) > 1:
		u.u32(udataKeyByteOrder, 0)
	case s.key[0].typ == typeInteger:
		u.u32(udataKeyByteOrder, host)
	default:
		u.u32(udataKeyByteOrder, network)
	}
	if len(s.data) == 1 {
		u.u32(udataDataByteOrder, host)
	} else if s.isMap() {
		u.u32(udataDataByteOrder, 0)
	}
	if s.typeof {
		u.add(udataKeyTypeof, describeAll(s.key))
		u.add(udataDataTypeof, describeAll(s.data))
	}
	if s.comment != "" {
		u.str(udataSetComment, s.comment)
	}
	return u
}

func describeAll(fields []field) udata {
	if len(fields) == 1 {
		return fields[0].typeof
	}
	var inner, u udata
	for i, f := range fields {
		inner.add(byte(i), f.typeof)
	}
	u.u32(0, exprConcat)
	u.add(1, inner)
	return u
}

// value is what an element holds beside its key.
type value struct {
	end     string // the range's last key, in sets of ranges of several fields
	flags   uint32 // intervalEnd
	data    string // a map's
	jump    string // a verdict map's: the chain
	comment string
	timeout time.Duration // in sets whose elements expire
}

// elem is an element and the set it is in.
type elem struct {
	set *set
	key string
	value
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

// base is one way to look up frontends: by address, protocol and port, or by
// protocol and port on the node's own addresses; in one family.
type base struct {
	family     *family
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
	family         *family
	nodePortAddrs  *set
	clusterIPs     *set
	hairpin        *set
	localEndpoints *set
	localPods      *set
	clients        *set // client . number of a Service port -> number of an endpoint
	// endpointsWithHelper are the addresses of endpoints of this node whose connections
	// have a helper.
	endpointsWithHelper *set
	// ftpEndpoints are the addresses and ports of FTP endpoints on any node.
	ftpEndpoints *set
	ftpBlock     *set // client . endpoint, or endpoint . client: the FTP block
}

// layout holds every set that the table can have. The sets of affinity timeouts are added
// with their first Service port.
type layout struct {
	common    [2]common // IPv4, IPv6
	addresses [2]base
	nodePorts [2]base
	sets      []*set
	counting  bool // see Config.ServiceCounters
	helpers   []*helper
}

func newLayout() *layout {
	l := &layout{}
	for i, f := range []*family{&ipv4, &ipv6} {
		addr := addrField(f)
		l.common[i] = common{
			family:         f,
			nodePortAddrs:  l.always("nodeport-addrs"+f.suffix, "the node's addresses that serve NodePorts", addr),
			clusterIPs:     l.always("cluster-ips"+f.suffix, "refused on ports that no Service has", addr),
			hairpin:        l.always("hairpin"+f.suffix, "endpoints here that may reach themselves", addr, addr),
			localEndpoints: l.always("local-endpoints"+f.suffix, "endpoints here, for what they answer", addr, protoField, portField),
			localPods:      l.always("local-pods"+f.suffix, "this node's pods", addr),
		}
		c := &l.common[i]
		c.clusterIPs.shared, c.hairpin.shared, c.localEndpoints.shared = true, true, true
		c.localPods.interval = true
		c.clients = l.newClients(f)
		l.addresses[i] = l.base(f, "services"+f.suffix, "addresses and ports of Services", addr, protoField, portField)
		l.nodePorts[i] = l.base(f, "nodeports"+f.suffix, "NodePorts of Services", protoField, portField)
		l.nodePorts[i].nodePort = true
	}
	l.newHelpers()
	return l
}

func (l *layout) add(s *set) *set {
	l.sets = append(l.sets, s)
	return s
}

func (l *layout) always(name, comment string, key ...field) *set {
	return l.add(&set{name: name, comment: comment, key: key, always: true})
}

func (l *layout) base(f *family, name, comment string, key ...field) base {
	b := base{family: f, name: name, frontends: l.always(name, comment, key...)}
	b.counters = l.add(&set{name: name + "-counters", key: key, counted: true, comment: "connections, and bytes of their first packets"})
	b.external = l.add(&set{name: name + "-outside", key: key, comment: "with endpoints of their own for packets from outside"})
	b.ranges = l.add(&set{name: name + "-ranges", key: key, comment: "with loadBalancerSourceRanges"})
	b.sources = l.add(&set{name: name + "-sources", key: append(key[:len(key):len(key)], addrField(f)), interval: true, comment: "who may ask them"})
	b.masquerade = l.add(&set{name: name + "-masquerade", key: key, comment: "whose packets get the node's address"})
	b.timeouts = map[time.Duration]*set{}
	b.inner = l.pool(f, name, key)
	b.outer = l.pool(f, name+"-outside", key)
	return b
}

func (l *layout) pool(f *family, name string, key []field) pool {
	endpoint := []field{addrField(f), portField}
	p := pool{name: name}
	p.one = l.add(&set{name: name + "-1", key: key, data: endpoint, comment: "of one endpoint"})
	for _, n := range classes {
		p.class = append(p.class, class{
			size:    n,
			members: l.add(&set{name: fmt.Sprintf("%s-upto-%d", name, n), key: key}),
			slots: l.add(&set{
				name: fmt.Sprintf("%s-%d", name, n), data: endpoint, typeof: true,
				key: append(key[:len(key):len(key)], slotField(uint32(n))),
			}),
		})
	}
	p.drop = l.add(&set{name: name + "-drop", key: key, comment: "without an endpoint here"})
	p.valid = l.add(&set{
		name: name + "-affinity", key: append(key[:len(key):len(key)], numberField), data: endpoint, typeof: true,
		comment: "what the numbers of endpoints mean",
	})
	return p
}

func (l *layout) commonOf(f *family) *common {
	if f == &ipv6 {
		return &l.common[1]
	}
	return &l.common[0]
}

func (l *layout) bases() []*base {
	return []*base{&l.addresses[0], &l.addresses[1], &l.nodePorts[0], &l.nodePorts[1]}
}
