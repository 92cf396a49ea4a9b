package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/test/testbed/topology"
)

// Families names the address families of a cluster.
type Families string

// The families.
const (
	IPv4 Families = "ipv4"
	IPv6 Families = "ipv6"
	// Dual has both, IPv4 first.
	Dual Families = "dual"
	// Mixed is Dual, but node1 has IPv4 alone and node2 IPv6 alone.
	Mixed Families = "mixed"
)

// AllFamilies lists all of them, the default first.
var AllFamilies = []Families{IPv4, IPv6, Dual, Mixed}

func (f Families) has4() bool { return f != IPv6 }
func (f Families) has6() bool { return f != IPv4 }

// of returns the values of a node's families, IPv4's first. -1 stands for the cluster.
func of[T any](f Families, node int, v4, v6 T) []T {
	var out []T
	if f.has4() && (f != Mixed || node != 2) {
		out = append(out, v4)
	}
	if f.has6() && (f != Mixed || node != 1) {
		out = append(out, v6)
	}
	return out
}

const wholeCluster = -1

func (c *Cluster) serviceCIDRs() []netip.Prefix {
	return of(c.Families, wholeCluster, netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd96::/112"))
}

func (c *Cluster) clusterCIDRs() []netip.Prefix {
	return of(c.Families, wholeCluster, c.topology.Spec.ClusterCIDR4, c.topology.Spec.ClusterCIDR6)
}

// dnsAddresses are the cluster IPs of DNS that a node's pods can use.
func dnsAddresses(f Families, node int) []string { return of(f, node, "10.96.0.10", "fd96::a") }

// Addresses returns the node's own addresses, the first of which is its main one.
func (n *Node) Addresses() []netip.Addr {
	return of(n.cluster.Families, n.host.Index, n.host.IPv4, n.host.IPv6)
}

// apiServer returns the API server's address that the node reaches.
func (n *Node) apiServer() netip.Addr { return n.cluster.nodes[0].host.Addr(n.Addresses()[0]) }

// join writes a list with commas, as most flags take it.
func join[T any](list []T) string {
	texts := make([]string, len(list))
	for i, v := range list {
		texts[i] = fmt.Sprint(v)
	}
	return strings.Join(texts, ",")
}

// apiServerName is the API server's name in /etc/hosts where nodes reach it at different
// addresses. Its certificate has the name.
const apiServerName = "kubernetes"

// apiServerForNodes is the API server's name or address on every node.
func (c *Cluster) apiServerForNodes() string {
	if c.Families == Mixed {
		return apiServerName
	}
	return c.APIServer()
}

// removeFamilies takes addresses away from the nodes of a Mixed cluster, and names the API
// server in their /etc/hosts.
func (c *Cluster) removeFamilies(ctx context.Context) error {
	if c.Families != Mixed {
		return nil
	}
	for _, n := range c.nodes {
		script := fmt.Sprintf("echo '%s %s' >>/etc/hosts\n", n.apiServer(), apiServerName)
		if !slices.Contains(n.Addresses(), n.host.IPv4) {
			script += "ip -4 address flush dev eth0\n"
		}
		if !slices.Contains(n.Addresses(), n.host.IPv6) {
			script += "sysctl -qw net.ipv6.conf.all.disable_ipv6=1\n"
		}
		if out, err := n.Command(ctx, "bash", "-euc", script).CombinedOutput(); err != nil {
			return fmt.Errorf("remove addresses of %s: %w: %s", n.Name(), err, out)
		}
	}
	return nil
}

// withoutLastNode keeps Pods that talk to the Service "kubernetes" off the node of a Mixed
// cluster that has IPv6 alone, as this Service has IPv4 alone.
func (c *Cluster) withoutLastNode(ctx context.Context, do func() error) error {
	if c.Families != Mixed {
		return do()
	}
	if _, err := c.Kubectl(ctx, "cordon", c.nodes[2].Name()); err != nil {
		return err
	}
	err := do()
	_, uncordoned := c.Kubectl(ctx, "uncordon", c.nodes[2].Name())
	return errors.Join(err, uncordoned)
}

// spec is the network of a cluster.
func (cfg Config) spec() topology.Spec {
	return topology.Spec{
		Name: cfg.Name, Nodes: cfg.Nodes, Clients: 1, PodNetwork: topology.None,
		IPv4: cfg.Families.has4(), IPv6: cfg.Families.has6(),
	}
}
