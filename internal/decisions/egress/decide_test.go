package egress

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

var flannel = &Rules{Masqueraded: []MasqueradeRange{
	{Sources: prefixes("10.244.1.0/24"), Outside: without(false, prefixes("10.244.0.0/16", "224.0.0.0/4"))},
	{Sources: prefixes("10.244.0.0/24", "10.244.2.0/23"), Outside: without(false, prefixes("10.244.1.0/24", "224.0.0.0/4"))},
	{Sources: prefixes("192.0.2.0/24"), Outside: prefixes("10.244.0.0/16")},
}}

var node = Node{PodCIDRs: prefixes("10.244.1.0/24"), ClusterCIDRs: prefixes("10.244.0.0/16")}

// masquerades reports whether a Plan gives the packet the node's address.
func (p Plan) masquerades(from, to string) bool {
	in := func(list []netip.Prefix, a string) bool {
		return slices.ContainsFunc(list, func(r netip.Prefix) bool { return r.Contains(netip.MustParseAddr(a)) })
	}
	return in(p.Sources, from) && !in(p.Keep, to)
}

func TestDecide(t *testing.T) {
	for _, tt := range []struct {
		name               string
		mode               Mode
		facts              Facts
		node               Node
		masqueraded, keeps string // pairs FROM>TO
		wrong              string
	}{
		{"off", Off, Facts{Rules: flannel}, node, "", "10.244.1.5>198.51.100.7", ""},
		{"not read yet", Auto, Facts{}, node, "", "10.244.1.5>198.51.100.7", ""},
		{"flannel", Auto, Facts{Rules: flannel}, node, "10.244.1.5>198.51.100.7",
			"10.244.1.5>169.254.169.254 10.244.1.5>10.244.2.5 " +
				"10.244.1.5>224.0.0.1 10.244.1.5>255.255.255.255 10.244.2.5>198.51.100.7 192.0.2.1>10.244.1.5 " +
				"fd00::1>2001:db8::1", ""},
		{"metadata servers", Auto, Facts{Rules: &Rules{Masqueraded: append(slices.Clone(flannel.Masqueraded),
			MasqueradeRange{Sources: prefixes("fd01::/64"), Outside: without(true, prefixes("fd01::/48"))})}},
			Node{PodCIDRs: append(prefixes("fd01::/64"), node.PodCIDRs...)},
			"10.244.1.5>168.63.129.17 10.244.1.5>100.100.100.201 fd01::1>fd20:ce::253 fd01::1>2001:db8::1",
			"10.244.1.5>168.63.129.16 10.244.1.5>100.100.100.200 fd01::1>fd00:ec2::254 fd01::1>fd20:ce::254", ""},
		{"a pod tells which range is this node's", Auto, Facts{Rules: flannel}, Node{Pods: []netip.Addr{netip.MustParseAddr("10.244.2.9")}},
			"10.244.2.9>198.51.100.7", "10.244.1.5>198.51.100.7", ""},
		{"rules of no pod", Auto, Facts{Rules: &Rules{Masqueraded: flannel.Masqueraded[2:]}}, node, "", "192.0.2.1>10.244.1.5", ""},
		{"other rules translate", Auto, Facts{Rules: &Rules{Masqueraded: flannel.Masqueraded, Translated: prefixes("198.51.100.0/24")}}, node,
			"10.244.1.5>203.0.113.1", "10.244.1.5>198.51.100.7", ""},
		{"a rule that is not understood", Auto, Facts{Rules: &Rules{Masqueraded: flannel.Masqueraded, Unclear: []string{"X: -j Y"}}}, node,
			"10.244.1.5>203.0.113.1", "", "X: -j Y"},
		{"rules that cannot be read", Auto, Facts{Err: "cannot"}, node, "", "10.244.1.5>198.51.100.7", "cannot"},
		{"on without a file", On, Facts{Rules: &Rules{}}, node, "10.244.1.5>198.51.100.7",
			"10.244.1.5>10.244.9.9 10.244.1.5>169.254.169.254 fd00::1>2001:db8::1", ""},
		{"on without anything", On, Facts{Rules: &Rules{}}, Node{}, "", "10.244.1.5>198.51.100.7", "--egress-config or --cluster-cidr"},
		{"on with a file", On, Facts{Rules: &Rules{},
			File: &File{NonMasqueradeCIDRs: prefixes("10.0.0.0/8", "fd00::/8"), MasqLinkLocal: true}}, node,
			"10.244.1.5>198.51.100.7 10.244.1.5>169.254.169.254 fd00::1>2001:db8::1", "10.244.1.5>10.1.1.1 fd00::1>fd01::1 fd00::1>fe80::1", ""},
		{"on with a file without IPv6", On, Facts{Rules: &Rules{}, File: &File{NonMasqueradeCIDRs: prefixes("10.0.0.0/8")}}, node,
			"10.244.1.5>198.51.100.7", "fd00::1>2001:db8::1", ""},
		{"the last good file stays", On, Facts{Rules: &Rules{}, File: &File{NonMasqueradeCIDRs: prefixes("10.0.0.0/8")}, Err: "bad"}, node,
			"10.244.1.5>198.51.100.7", "", "bad"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, wrong := Decide(tt.mode, tt.facts, tt.node)
			for _, pair := range strings.Fields(tt.masqueraded) {
				if from, to, _ := strings.Cut(pair, ">"); !plan.masquerades(from, to) {
					t.Errorf("%s is left to netfilter", pair)
				}
			}
			for _, pair := range strings.Fields(tt.keeps) {
				if from, to, _ := strings.Cut(pair, ">"); plan.masquerades(from, to) {
					t.Errorf("%s is masqueraded", pair)
				}
			}
			if got := strings.Join(wrong, "\n"); tt.wrong == "" && got != "" || !strings.Contains(got, tt.wrong) {
				t.Errorf("wrong: %q, want %q", got, tt.wrong)
			}
		})
	}
}

func TestAddresses(t *testing.T) {
	addrs := func(texts ...string) (list []netip.Addr) {
		for _, a := range texts {
			list = append(list, netip.MustParseAddr(a))
		}
		return list
	}
	n := node
	n.Addrs = addrs("10.244.1.1", "169.254.1.1", "198.51.100.1", "203.0.113.1", "203.0.113.2", "2001:db8::1")
	temporary := netip.MustParseAddr("203.0.113.3")
	for i := range 20 {
		n.Addrs = append(n.Addrs, netip.AddrFrom4([4]byte{203, 0, 114, byte(i)}))
	}
	lasting := slices.Clone(n.Addrs)
	n.Addrs = slices.Insert(n.Addrs, 5, temporary)
	deprecated := addrs("2001:db8::2", "198.51.100.2")
	n.Addrs = append(n.Addrs, deprecated...)
	for _, tt := range []struct {
		name   string
		ranges []netip.Prefix
		want   []netip.Addr
		wrong  string
	}{
		{"none", nil, nil, ""},
		{"those in a range", prefixes("203.0.113.0/24"), addrs("203.0.113.1", "203.0.113.2"), ""},
		{"of a family that does not leave", prefixes("203.0.113.1/32", "2001:db8::/64"), addrs("203.0.113.1"), ""},
		{"a temporary one", prefixes("203.0.113.3/32"), nil, "has no address in 203.0.113.3/32"},
		{"a deprecated one of a range", prefixes("198.51.100.0/30"), addrs("198.51.100.1"), ""},
		{"a deprecated one that is named alone", prefixes("198.51.100.0/30", "198.51.100.2/32"), addrs("198.51.100.1", "198.51.100.2"), ""},
		{"none but a deprecated one", prefixes("198.51.100.2/31"), nil,
			"has no address in 198.51.100.2/31 of --egress-addresses but deprecated ones (name it alone: 198.51.100.2/32): connections"},
		{"none in the range", prefixes("192.0.2.0/24"), nil, "has no address in 192.0.2.0/24 of --egress-addresses"},
		{"link-local", prefixes("169.254.0.0/16"), nil, "has no address in"},
		{"too many", prefixes("203.0.114.0/24"), lasting[6:22], "has 20 addresses in 203.0.114.0/24"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, wrong := Decide(Auto, Facts{
				Rules: flannel, Addresses: tt.ranges, Lasting: lasting, Deprecated: deprecated, AddressesOf: "--egress-addresses",
			}, n)
			if !slices.Equal(plan.Addresses, tt.want) {
				t.Errorf("addresses %v, want %v", plan.Addresses, tt.want)
			}
			if got := strings.Join(wrong, "\n"); tt.wrong == "" && got != "" || !strings.Contains(got, tt.wrong) {
				t.Errorf("wrong: %q, want %q", got, tt.wrong)
			}
		})
	}
}

func TestForPods(t *testing.T) {
	a, b, six := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8::1")
	p := Plan{Addresses: []netip.Addr{a, b, six}}
	for i, got := range p.ForPods(false) {
		if want := []netip.Addr{a, b}[i%2]; got != want {
			t.Errorf("group %d has %s, want %s", i, got, want)
		}
	}
	if got := p.ForPods(true); len(got) != PodGroups || got[15] != six {
		t.Errorf("IPv6 has %v", got)
	}
	if got := (Plan{Addresses: []netip.Addr{six}}).ForPods(false); got != nil {
		t.Errorf("IPv4 has %v, want none", got)
	}
}
