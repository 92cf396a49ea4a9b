package nftables

import (
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestPodsOfThisNodeAreToldAsTheModeSays(t *testing.T) {
	enter(t)
	b := open(t)
	p := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), nodePort(30080, intent.ToLocal, intent.ToCluster),
		here("10.244.0.2:8080"))
	for _, row := range []struct {
		local intent.LocalTraffic
		want  string // in the rules that ask; "": the node cannot tell
	}{
		{intent.LocalTraffic{Sources: prefixes("10.244.0.0/24")}, "ip saddr != @local-pods4"},
		{intent.LocalTraffic{Sources: prefixes("fd44::/64")}, ""}, // of the other family
		{intent.LocalTraffic{Interface: "cni0"}, `iifname != "cni0"`},
		{intent.LocalTraffic{Prefix: "veth"}, `iifname != "veth*"`},
		{intent.LocalTraffic{}, ""},
	} {
		n := node()
		n.Local = row.local
		replace(t, b, intent.State{Node: n, Ports: []*intent.ServicePort{p}})
		masquerade := lineWith(run(t, "nft", "list", "chain", "inet", "spillway", chainMasquerade), "ct original ip daddr",
			"not from this node's pods")
		outside := lineWith(run(t, "nft", "list", "chain", "inet", "spillway", "nodeports4"), "from another machine")
		if row.want == "" {
			if masquerade != "" || strings.Contains(outside, "iif") || strings.Contains(outside, "local-pods") || outside == "" {
				t.Errorf("%+v: %s %s", row.local, masquerade, outside)
			}
		} else if !strings.Contains(masquerade, row.want) || !strings.Contains(outside, row.want) {
			t.Errorf("%+v: %s %s", row.local, masquerade, outside)
		}
	}
}

// lineWith is the line that holds all of the words, "" if none does.
func lineWith(text string, words ...string) string {
next:
	for line := range strings.Lines(text) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		return line
	}
	return ""
}
