package intent

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// An externalIP or a LoadBalancer IP may be a node's own address, where the kubelet, the CNI
// and others listen. A Service with one of their ports would take it: on the node itself,
// and on all others, which send to that node. kube-proxy serves such a Service. Intent does
// not serve the ports that keep a node in the cluster, and reports the Service. It goes by a
// list and not by the node's sockets, so that all nodes agree, and so that a Service does
// not get the port while the kubelet restarts.
//
// A node's addresses are those of its Node object. The kernel may have more, such as a
// virtual address that moves between nodes; it belongs to a load balancer.

// socket is a port that a node listens on.
type socket struct {
	protocol model.Protocol
	port     uint16
}

// reservedPorts are the ports that are not served at nodes' addresses, and their users.
var reservedPorts = map[socket]string{
	{model.TCP, 179}:   "BGP",
	{model.TCP, 2379}:  "etcd",
	{model.TCP, 2380}:  "etcd",
	{model.TCP, 10250}: "the kubelet",
	{model.UDP, 4789}:  "VXLAN",
	{model.UDP, 6081}:  "Geneve",
	{model.UDP, 8472}:  "VXLAN",
	{model.UDP, 51820}: "WireGuard",
	{model.UDP, 51821}: "WireGuard",
	{model.UDP, 51871}: "WireGuard",
}

// sshPort is served and reported: Services such as those of Git servers use it.
var sshPort = socket{model.TCP, 22}

// apiServerService is the Service whose endpoints are the API servers.
var apiServerService = model.Name{Namespace: "default", Name: "kubernetes"}

// ofAPIServers recognizes the slice of the API servers. They name it as its Service, and
// write it again if another program changes it; slices of other names are any author's.
func ofAPIServers(s *model.EndpointSlice) bool {
	return s.Service == apiServerService && s.Name.Name == apiServerService.Name
}

// reserved returns the program or protocol that keeps an address and port from Services; ""
// for none.
func (t *Tracker) reserved(k addressKey) string {
	if t.own.nodeAddrs[k.Addr] == 0 {
		return ""
	}
	if user := reservedPorts[socket{k.Protocol, k.Port}]; user != "" {
		return user
	}
	if k.Protocol != model.TCP {
		return ""
	}
	if slices.ContainsFunc(t.cfg.Servers, func(s netip.AddrPort) bool {
		return s.Port() == k.Port && (s.Addr().IsUnspecified() || s.Addr().Unmap() == k.Addr)
	}) {
		return "this agent"
	}
	for _, s := range t.slicesAt(k.Addr) {
		if ofAPIServers(s.EndpointSlice) && s.hasPort(k) {
			return "the API server"
		}
	}
	return ""
}

// reservedConflict returns what is wrong with a request for a port that nodes listen on, ""
// for nothing, and whether it is served.
func (t *Tracker) reservedConflict(c addressRequest) (what string, served bool) {
	if user := t.reserved(c.key); user != "" {
		return fmt.Sprintf("%s is the port of %s at a node's address, and is not served; change the port, or remove the address", c.key, user),
			false
	}
	if (socket{c.key.Protocol, c.key.Port}) == sshPort && t.own.nodeAddrs[c.key.Addr] > 0 {
		return fmt.Sprintf("%s is the port of SSH at a node's address, where it hides the node's SSH server; change the port, unless you "+
			"want that", c.key), true
	}
	return "", true
}

// countNodeAddrs adds 1 or -1 to the Nodes that have the addresses, and marks the Services
// dirty that have them as an externalIP or LoadBalancer IP.
func (t *Tracker) countNodeAddrs(addrs []netip.Addr, by int) {
	for _, a := range addrs {
		a = a.Unmap()
		before := t.own.nodeAddrs[a]
		if t.own.nodeAddrs[a] = before + by; before+by == 0 {
			delete(t.own.nodeAddrs, a)
		}
		if before == 0 || before+by == 0 {
			t.countInClusterCIDRs(a, by)
			t.markAddressConflictsDirty(a)
			if t.own.has(a) {
				t.markHostPortsDirty()
			}
		}
	}
}
