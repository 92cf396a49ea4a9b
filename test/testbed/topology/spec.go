package topology

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
)

// The values of Spec.PodNetwork.
const (
	Routed = "routed" // host-gw: a route to each other node's pod CIDR through the LAN
	VXLAN  = "vxlan"  // flannel.1 with permanent neighbor and FDB entries
	None   = "none"   // no pods: a CNI plugin connects its own
)

// The largest sizes that the address plan has room for.
const (
	maxNodes   = 100
	maxPods    = 200
	maxClients = 50
)

// Spec describes a cluster. Zero values of fields that DefaultSpec sets mean the default,
// except for the counts.
type Spec struct {
	Name        string       `json:"name"` // a DNS label of at most 20 characters
	Nodes       int          `json:"nodes"`
	PodsPerNode int          `json:"podsPerNode"`
	Clients     int          `json:"clients"`       // machines on the LAN outside the cluster
	PodNetwork  string       `json:"podNetwork"`    // Routed, VXLAN or None
	IPv4        bool         `json:"ipv4"`          // neither set means both
	IPv6        bool         `json:"ipv6"`          //
	LAN4        netip.Prefix `json:"lan4,omitzero"` // nodes are .10 and up, clients .200 and up
	LAN6        netip.Prefix `json:"lan6,omitzero"`
	// ClusterCIDR4 is divided into a /24 for each node, ClusterCIDR6 into a /64.
	ClusterCIDR4 netip.Prefix `json:"clusterCIDR4,omitzero"`
	ClusterCIDR6 netip.Prefix `json:"clusterCIDR6,omitzero"`
	// ExternalRanges are the ranges that clients route to node0: the addresses of
	// externalIPs and load balancers. Clients never get a route to pods.
	ExternalRanges []netip.Prefix `json:"externalRanges,omitempty"`
	// RPFilter is net.ipv4.conf.{all,default}.rp_filter in every namespace: 0
	// off, 1 strict, 2 loose.
	RPFilter int `json:"rpFilter"`
	// Masquerade loads flannel's masquerade rules on each node. They enable conntrack
	// there, as on a real node.
	Masquerade bool `json:"masquerade,omitempty"`
	// Conntrack turns conntrack on in each node without any address translation.
	Conntrack bool `json:"conntrack,omitempty"`
	// Zones are assigned to nodes in turn as topology.kubernetes.io/zone; empty gives
	// each node a zone of its own.
	Zones []string `json:"zones,omitempty"`
}

// DefaultSpec is a dual-stack cluster of two nodes with three pods each and one
// outside client.
func DefaultSpec(name string) Spec {
	return Spec{Name: name, Nodes: 2, PodsPerNode: 3, Clients: 1}.withDefaults()
}

func (s Spec) withDefaults() Spec {
	if !s.IPv4 && !s.IPv6 {
		s.IPv4, s.IPv6 = true, true
	}
	if s.PodNetwork == "" {
		s.PodNetwork = Routed
	}
	set := func(p *netip.Prefix, text string) {
		if !p.IsValid() {
			*p = netip.MustParsePrefix(text)
		}
		*p = p.Masked()
	}
	set(&s.LAN4, "172.30.0.0/24")
	set(&s.LAN6, "fd30::/64")
	set(&s.ClusterCIDR4, "10.244.0.0/16")
	set(&s.ClusterCIDR6, "fd44::/48")
	if len(s.ExternalRanges) == 0 {
		s.ExternalRanges = []netip.Prefix{
			netip.MustParsePrefix("203.0.113.0/24"),
			netip.MustParsePrefix("2001:db8:ff::/64"),
		}
	}
	return s
}

var nameRule = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?$`)

// Validate returns an error of one line that names the invalid field of a Spec.
func (s Spec) Validate() error {
	s = s.withDefaults()
	if err := validName(s.Name); err != nil {
		return err
	}
	for _, c := range []struct {
		field         string
		got, min, max int
	}{
		{"nodes", s.Nodes, 1, maxNodes},
		{"pods per node", s.PodsPerNode, 0, maxPods},
		{"clients", s.Clients, 0, maxClients},
		{"rp_filter", s.RPFilter, 0, 2},
	} {
		if c.got < c.min || c.got > c.max {
			return fmt.Errorf("lab spec: %s: %d is not between %d and %d", c.field, c.got, c.min, c.max)
		}
	}
	if !slices.Contains([]string{Routed, VXLAN, None}, s.PodNetwork) {
		return fmt.Errorf("lab spec: pod network: %q is none of %q, %q and %q", s.PodNetwork, Routed, VXLAN, None)
	}
	if s.PodNetwork == None && s.PodsPerNode > 0 {
		return fmt.Errorf("lab spec: pods per node: %d without a pod network", s.PodsPerNode)
	}
	return s.validateRanges()
}

// ErrName is the error of a name that no cluster can have.
var ErrName = errors.New("not a DNS label of at most 20 characters (a-z, 0-9, -)")

// ValidName returns ErrName if no cluster can have the name.
func ValidName(name string) error {
	if !nameRule.MatchString(name) {
		return ErrName
	}
	return nil
}

func validName(name string) error {
	if err := ValidName(name); err != nil {
		return fmt.Errorf("lab spec: name: %q is %w", name, err)
	}
	return nil
}

func (s Spec) validateRanges() error {
	ranges := []struct {
		field string
		p     netip.Prefix
		is4   bool
		bits  int // the longest prefix that has room for the plan
	}{
		{"IPv4 LAN", s.LAN4, true, 24},
		{"IPv6 LAN", s.LAN6, false, 64},
		{"IPv4 cluster CIDR", s.ClusterCIDR4, true, 24},
		{"IPv6 cluster CIDR", s.ClusterCIDR6, false, 64},
	}
	for _, r := range ranges {
		if r.p.Addr().Is4() != r.is4 {
			return fmt.Errorf("lab spec: %s: %s is of the other address family", r.field, r.p)
		}
		if r.p.Bits() > r.bits {
			return fmt.Errorf("lab spec: %s: %s is too small, give a /%d or wider", r.field, r.p, r.bits)
		}
	}
	if room := nodeSubnets(s.ClusterCIDR4, podBits4); room < s.Nodes {
		return fmt.Errorf("lab spec: IPv4 cluster CIDR: %s has room for %d nodes, not %d", s.ClusterCIDR4, room, s.Nodes)
	}
	if room := nodeSubnets(s.ClusterCIDR6, podBits6); room < s.Nodes {
		return fmt.Errorf("lab spec: IPv6 cluster CIDR: %s has room for %d nodes, not %d", s.ClusterCIDR6, room, s.Nodes)
	}
	all := append([]netip.Prefix{s.LAN4, s.LAN6, s.ClusterCIDR4, s.ClusterCIDR6}, s.ExternalRanges...)
	for i, p := range all {
		if !p.IsValid() {
			return fmt.Errorf("lab spec: external ranges: an entry is not a prefix")
		}
		if j := slices.IndexFunc(all[:i], p.Overlaps); j >= 0 {
			return fmt.Errorf("lab spec: %s overlaps %s", p, all[j])
		}
	}
	return nil
}

// difference names the first field that differs in two specs, "" if none does.
func difference(have, want Spec) string {
	h, w := reflect.ValueOf(have), reflect.ValueOf(want)
	for i := range h.NumField() {
		a, b := h.Field(i), w.Field(i)
		if a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0 {
			continue
		}
		if !reflect.DeepEqual(a.Interface(), b.Interface()) {
			return fmt.Sprintf("%s is %v, asked for %v", h.Type().Field(i).Name, a.Interface(), b.Interface())
		}
	}
	return ""
}
