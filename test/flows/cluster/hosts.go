package cluster

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/testbed/topology"
)

// externalHalves are what clients route to the nodes: the lower half of the
// lab's range through node a, the upper half through node b.
var externalHalves = map[string][2]netip.Prefix{
	"a": {netip.MustParsePrefix("203.0.113.0/25"), netip.MustParsePrefix("2001:db8:ff::/113")},
	"b": {netip.MustParsePrefix("203.0.113.128/25"), netip.MustParsePrefix("2001:db8:ff::8000/113")},
}

// External returns the i-th address that clients route to a node.
func (c *Cluster) External(node string, i int, v6 bool) netip.Addr {
	addr := externalHalves[node][index(v6)].Addr()
	for range i + 1 {
		addr = addr.Next()
	}
	return addr
}

func index(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

// Addr returns an address of a short name: "a/bridge" is the node's address on
// the pod bridge, "a/loopback" is loopback. The zero value if there is none.
func (c *Cluster) Addr(short string, v6 bool) netip.Addr {
	host, err := c.Host(ParseName(short).Base)
	if err != nil {
		return netip.Addr{}
	}
	switch ParseName(short).Extra {
	case "loopback":
		if v6 {
			return netip.IPv6Loopback()
		}
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case "bridge":
		for _, cidr := range host.PodCIDRs {
			if cidr.Addr().Is6() == v6 {
				return cidr.Masked().Addr().Next()
			}
		}
		return netip.Addr{}
	}
	if v6 {
		return host.IPv6
	}
	return host.IPv4
}

// NodeName is the Kubernetes name of the node that a host is or runs on.
func (c *Cluster) NodeName(short string) string {
	host, err := c.Host(ParseName(short).Base)
	if err != nil {
		return ""
	}
	return host.Node
}

// NodeOf is the short name of the node that a host is or runs on, "" for a
// client.
func (c *Cluster) NodeOf(short string) string {
	if n := ParseName(short); !n.IsClient() {
		return n.Base[:1]
	}
	return ""
}

// Zone is the zone of a host's node.
func (c *Cluster) Zone(short string) string {
	node, err := c.Host(c.NodeOf(short))
	if err != nil {
		return ""
	}
	return node.Zone
}

// Owns reports whether an address is one of a host's own. A node also owns the
// addresses of its pod bridge.
func (c *Cluster) Owns(short string, addr netip.Addr) bool {
	own := []string{ParseName(short).Base}
	if !ParseName(short).IsPod() && !ParseName(short).IsClient() {
		own = append(own, own[0]+"/bridge")
	}
	return slices.ContainsFunc(own, func(o string) bool { return c.Addr(o, addr.Is6()) == addr }) ||
		len(own) == 2 && c.isVXLANAddr(own[0], addr)
}

// isVXLANAddr tells whether addr is a node's on flannel's VXLAN device: the
// first of its pod CIDR.
func (c *Cluster) isVXLANAddr(node string, addr netip.Addr) bool {
	host, err := c.Host(node)
	if err != nil || c.Spec.PodNetwork != topology.VXLAN {
		return false
	}
	return slices.ContainsFunc(host.PodCIDRs, func(p netip.Prefix) bool { return p.Masked().Addr() == addr })
}

// routeClient gives an outside client its routes to external addresses.
func (c *Cluster) routeClient(client *topology.Host) error {
	routes := map[netip.Prefix]string{}
	for _, node := range c.Nodes() {
		for _, half := range externalHalves[node] {
			if half.IsValid() {
				routes[half] = node
			}
		}
	}
	for _, r := range c.Routes {
		routes[r] = "a"
	}
	return client.Do(func() error {
		for prefix, node := range routes {
			if !c.Addr(node, prefix.Addr().Is6()).IsValid() {
				continue // the cluster has the other family alone
			}
			route := &netlink.Route{
				Dst: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())},
				Gw:  c.Addr(node, prefix.Addr().Is6()).AsSlice(),
			}
			if err := netlink.RouteReplace(route); err != nil {
				return fmt.Errorf("route %s of %s through %s: %w", prefix, client.Name, node, err)
			}
		}
		return nil
	})
}

// Probe returns the probe of a short name, which it starts when first asked.
func (c *Cluster) Probe(short string) (*probe.Process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.probes[short]; p != nil {
		return p, nil
	}
	host, err := c.Host(short)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find test binary: %w", err)
	}
	// Not the caller's context: the probe lives as long as the cluster.
	cmd := host.Command(context.Background(), self, probe.Arg)
	cmd.Env = append(cmd.Env, "GOMAXPROCS=1") // many probes share the machine
	cmd.Stderr = os.Stderr
	p, err := probe.Start(short, cmd)
	if err != nil {
		return nil, err
	}
	c.probes[short] = p
	return p, nil
}

// startServers starts a server on every host: in pods and on clients in the
// probe, on nodes in that of the pod on the node's network.
func (c *Cluster) startServers(ctx context.Context) error {
	for _, h := range c.Lab.Hosts() {
		short := h.Name
		if h.Kind != topology.KindClient {
			short = string(rune('a' + c.nodeIndex(h)))
		}
		if h.Kind == topology.KindPod {
			short += strconv.Itoa(h.Index)
		}
		from := short
		if h.Kind == topology.KindNode {
			from += "/host"
		}
		p, err := c.Probe(from)
		if err != nil {
			return err
		}
		for _, port := range ServerPorts {
			if _, err := p.Do(ctx, serveRequest(short, port)); err != nil {
				return fmt.Errorf("start server %s: %w", short, err)
			}
		}
	}
	return nil
}

func (c *Cluster) nodeIndex(h *topology.Host) int {
	n, _ := strconv.Atoi(h.Node[len("node"):])
	return n
}

func serveRequest(short string, port int) probe.Request {
	name := short
	if port != ServerPorts[0] {
		name += ":" + strconv.Itoa(port)
	}
	return probe.Request{Op: probe.Serve, Server: name, Listen: []string{
		fmt.Sprintf("tcp [::]:%d", port), fmt.Sprintf("udp [::]:%d", port),
	}}
}
