package egress

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

var flannel = &Rules{Ways: []Way{
	{Sources: prefixes("10.244.1.0/24"), Leaves: without(false, prefixes("10.244.0.0/16", "224.0.0.0/4"))},
	{Sources: prefixes("10.244.0.0/24", "10.244.2.0/23"), Leaves: without(false, prefixes("10.244.1.0/24", "224.0.0.0/4"))},
	{Sources: prefixes("192.0.2.0/24"), Leaves: prefixes("10.244.0.0/16")},
}}

var node = Node{PodCIDRs: prefixes("10.244.1.0/24"), ClusterCIDRs: prefixes("10.244.0.0/16")}

// leaves reports whether a Plan gives the packet the node's address.
func (p Plan) leaves(from, to string) bool {
	in := func(list []netip.Prefix, a string) bool {
		return slices.ContainsFunc(list, func(r netip.Prefix) bool { return r.Contains(netip.MustParseAddr(a)) })
	}
	return in(p.Sources, from) && !in(p.Keep, to)
}

func TestDecide(t *testing.T) {
	for _, tt := range []struct {
		name          string
		mode          Mode
		facts         Facts
		node          Node
		leaves, keeps string // pairs FROM>TO
		wrong         string
	}{
		{"off", Off, Facts{Rules: flannel}, node, "", "10.244.1.5>198.51.100.7", ""},
		{"not read yet", Auto, Facts{}, node, "", "10.244.1.5>198.51.100.7", ""},
		{"flannel", Auto, Facts{Rules: flannel}, node, "10.244.1.5>198.51.100.7",
			"10.244.1.5>169.254.169.254 10.244.1.5>10.244.2.5 " +
				"10.244.1.5>224.0.0.1 10.244.1.5>255.255.255.255 10.244.2.5>198.51.100.7 192.0.2.1>10.244.1.5 " +
				"fd00::1>2001:db8::1", ""},
		{"a pod tells which range is this node's", Auto, Facts{Rules: flannel}, Node{Pods: []netip.Addr{netip.MustParseAddr("10.244.2.9")}},
			"10.244.2.9>198.51.100.7", "10.244.1.5>198.51.100.7", ""},
		{"rules of no pod", Auto, Facts{Rules: &Rules{Ways: flannel.Ways[2:]}}, node, "", "192.0.2.1>10.244.1.5", ""},
		{"other rules translate", Auto, Facts{Rules: &Rules{Ways: flannel.Ways, Translated: prefixes("198.51.100.0/24")}}, node,
			"10.244.1.5>203.0.113.1", "10.244.1.5>198.51.100.7", ""},
		{"a rule that is not understood", Auto, Facts{Rules: &Rules{Ways: flannel.Ways, Unclear: []string{"X: -j Y"}}}, node,
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
			for _, pair := range strings.Fields(tt.leaves) {
				if from, to, _ := strings.Cut(pair, ">"); !plan.leaves(from, to) {
					t.Errorf("%s is left to netfilter", pair)
				}
			}
			for _, pair := range strings.Fields(tt.keeps) {
				if from, to, _ := strings.Cut(pair, ">"); plan.leaves(from, to) {
					t.Errorf("%s leaves", pair)
				}
			}
			if got := strings.Join(wrong, "\n"); tt.wrong == "" && got != "" || !strings.Contains(got, tt.wrong) {
				t.Errorf("wrong: %q, want %q", got, tt.wrong)
			}
		})
	}
}
