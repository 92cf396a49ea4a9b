package topology

import (
	"fmt"
	"net"
	"net/netip"
)

const (
	podBits4 = 24 // the size of a node's pod CIDR, as flannel cuts it
	podBits6 = 64

	firstNode   = 10 // the host part of node0's LAN address
	firstClient = 200
	firstPod    = 2 // .1 is the bridge

	ethernetMTU = 1500
)

// nodeSubnets returns how many subnets of the given length a prefix contains, at most
// 65536.
func nodeSubnets(p netip.Prefix, bits int) int {
	return 1 << min(max(bits-p.Bits(), 0), 16)
}

// subnet returns the i-th subnet of the given length.
func subnet(p netip.Prefix, bits, i int) netip.Prefix {
	raw := p.Masked().Addr().AsSlice()
	for bit := bits - 1; i > 0; bit-- {
		raw[bit/8] |= byte(i&1) << (7 - bit%8)
		i >>= 1
	}
	a, _ := netip.AddrFromSlice(raw)
	return netip.PrefixFrom(a, bits)
}

// nth returns the address of a prefix with the given host part.
func nth(p netip.Prefix, host int) netip.Addr {
	raw := p.Masked().Addr().AsSlice()
	raw[len(raw)-1] += byte(host)
	raw[len(raw)-2] += byte(host >> 8)
	a, _ := netip.AddrFromSlice(raw)
	return a
}

// macOf derives a hardware address from an IPv4 address, as CNI plugins do. The address
// is stable over repairs and easy to find in a packet dump.
func macOf(prefix byte, a netip.Addr) net.HardwareAddr {
	b := a.As4()
	return net.HardwareAddr{prefix, 0x58, b[0], b[1], b[2], b[3]}
}

// newCluster plans the hosts of a valid spec. It creates nothing.
func newCluster(s Spec, cgroupRoot string) *Cluster {
	c := &Cluster{Spec: s, cgroupRoot: cgroupRoot}
	for n := range s.Nodes {
		node := c.planNode(n)
		c.nodes = append(c.nodes, node)
		for p := range s.PodsPerNode {
			c.pods = append(c.pods, c.planPod(node, p))
		}
	}
	for i := range s.Clients {
		h := c.host(KindClient, fmt.Sprintf("client%d", i), i)
		h.setAddrs(nth(s.LAN4, firstClient+i), nth(s.LAN6, firstClient+i))
		h.Cgroup = c.cgroupRoot + "/" + h.Name
		h.CgroupRoot = h.Cgroup
		c.clients = append(c.clients, h)
	}
	return c
}

func (c *Cluster) host(kind Kind, name string, index int) *Host {
	return &Host{
		Cluster:   c.Spec.Name,
		Name:      name,
		Kind:      kind,
		Index:     index,
		Namespace: namespaceName(c.Spec.Name, name),
		families:  families{c.Spec.IPv4, c.Spec.IPv6},
	}
}

func (c *Cluster) planNode(n int) *Host {
	s := c.Spec
	h := c.host(KindNode, fmt.Sprintf("node%d", n), n)
	h.setAddrs(nth(s.LAN4, firstNode+n), nth(s.LAN6, firstNode+n))
	h.Node = h.Name
	h.CgroupRoot = c.cgroupRoot + "/" + h.Name
	h.Cgroup = h.CgroupRoot + "/host"
	h.podCIDR4 = subnet(s.ClusterCIDR4, podBits4, n)
	h.podCIDR6 = subnet(s.ClusterCIDR6, podBits6, n)
	if s.IPv4 {
		h.PodCIDRs = append(h.PodCIDRs, h.podCIDR4)
	}
	if s.IPv6 {
		h.PodCIDRs = append(h.PodCIDRs, h.podCIDR6)
	}
	h.Zone = fmt.Sprintf("zone%d", n)
	if len(s.Zones) > 0 {
		h.Zone = s.Zones[n%len(s.Zones)]
	}
	return h
}

func (c *Cluster) planPod(node *Host, p int) *Host {
	h := c.host(KindPod, fmt.Sprintf("%s-pod%d", node.Name, p), p)
	h.setAddrs(nth(node.podCIDR4, firstPod+p), nth(node.podCIDR6, firstPod+p))
	h.Node = node.Name
	h.NodeDevice = fmt.Sprintf("veth%d", p)
	h.Cgroup = fmt.Sprintf("%s/pod%d", node.CgroupRoot, p)
	h.CgroupRoot = h.Cgroup
	return h
}

// podMTU is the MTU of flannel's pods: a vxlan header takes 50 bytes over IPv4 and 70
// over IPv6.
func (s Spec) podMTU() int {
	switch {
	case s.PodNetwork != VXLAN:
		return ethernetMTU
	case s.IPv6:
		return ethernetMTU - vxlanOverhead6
	default:
		return ethernetMTU - vxlanOverhead4
	}
}

// families returns the address families of a cluster.
type families struct{ v4, v6 bool }

// pick returns each of an IPv4 and an IPv6 value whose family is in use.
func pick[T any](f families, v4, v6 T) []T {
	var out []T
	if f.v4 {
		out = append(out, v4)
	}
	if f.v6 {
		out = append(out, v6)
	}
	return out
}
