package iptables

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestRangesOfPodsAreJoined(t *testing.T) {
	for _, test := range []struct{ in, want string }{
		{"", "[]"},
		{"10.244.0.0/24 10.244.1.0/24 10.244.2.0/24", "[10.244.0.0/23 10.244.2.0/24]"},
		{"10.244.3.0/24 10.244.0.0/24 10.244.2.0/24 10.244.1.0/24", "[10.244.0.0/22]"},
		{"10.244.1.0/24 10.244.2.0/24", "[10.244.1.0/24 10.244.2.0/24]"},
		{"10.0.0.0/8 10.244.1.0/24", "[10.0.0.0/8]"},
		{"0.0.0.0/1 128.0.0.0/1", "[0.0.0.0/0]"},
		{"fd44:1::/64 fd44:1:0:1::/64", "[fd44:1::/63]"},
	} {
		var in []netip.Prefix
		for _, p := range strings.Fields(test.in) {
			in = append(in, prefix(p))
		}
		if got := fmt.Sprint(aggregate(in)); got != test.want {
			t.Errorf("%s become %s, want %s", test.in, got, test.want)
		}
	}
}

func TestNoChainNameIsTooLong(t *testing.T) {
	w := newRandomWorld(9)
	for range 2000 {
		p := w.port(id("a", "b", 1, protocolDigits[w.IntN(3)], []model.Family{model.IPv4, model.IPv6}[w.IntN(2)]))
		r := newRuleset(newNodeInputs(p.ID.Family, testNode(), false))
		r.apply([]*intent.ServicePort{p}, nil)
		for name := range r.want[tableNAT] {
			if len(name) > maxChainName {
				t.Fatalf("%s has %d characters", name, len(name))
			}
		}
	}
}
