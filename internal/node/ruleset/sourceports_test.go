package ruleset

import "testing"

func TestSourcePortsAndTheRuleWithoutThem(t *testing.T) {
	for _, row := range []struct{ command, text, ports, all string }{
		{"iptables-nft", "-s 10.0.0.0/8 -p tcp -j MASQUERADE --to-ports 40000-40009 --random-fully", "40000-40009",
			"iptables-nft -t nat -R C 3 -s 10.0.0.0/8 -p tcp -j MASQUERADE --random-fully"},
		{"iptables-nft", "-p tcp -j MASQUERADE --to-ports 40000", "40000-40000", "iptables-nft -t nat -R C 3 -p tcp -j MASQUERADE"},
		{"iptables-legacy", "-j MASQUERADE", "1024-65535", ""},
		{"iptables-legacy", "-p udp -j SNAT --to-source 192.0.2.1-192.0.2.4:1024-2047", "1024-2047",
			"iptables-legacy -t nat -R C 3 -p udp -j SNAT --to-source 192.0.2.1-192.0.2.4"},
		{"ip6tables-nft", "-p tcp -j SNAT --to-source [2001:db8::1]:1024-2047", "1024-2047",
			"ip6tables-nft -t nat -R C 3 -p tcp -j SNAT --to-source '[2001:db8::1]'"},
		{"ip6tables-nft", "-p tcp -j SNAT --to-source 2001:db8::1", "1024-65535", ""},
		{"iptables-nft", `-p tcp -m comment --comment "x --to-ports 1-2" -j MASQUERADE`, "1024-65535", ""},
		{"nft", "masquerade", "1024-65535", ""},
		{"nft", "ip saddr 10.0.0.0/8 meta l4proto tcp masquerade to :40000-40009 random", "40000-40009",
			"nft replace rule ip nat C handle 3 'ip saddr 10.0.0.0/8 meta l4proto tcp masquerade random'"},
		{"nft", "ip saddr 10.0.0.0/8 snat to 192.0.2.1:40000-40009", "40000-40009",
			"nft replace rule ip nat C handle 3 'ip saddr 10.0.0.0/8 snat to 192.0.2.1'"},
		{"nft", `meta l4proto tcp snat ip6 to [2001:db8::1]:5060 comment "to :1"`, "5060-5060",
			`nft replace rule ip nat C handle 3 'meta l4proto tcp snat ip6 to [2001:db8::1] comment "to :1"'`},
		{"nft", "snat to 192.0.2.1:99999", "1024-65535", ""},
		{"nft", "dnat to 192.0.2.1:80", "", ""},
		{"iptables-nft", "-p tcp -j REDIRECT --to-ports 80", "", ""},
	} {
		r := &Rule{Command: row.command, Family: "ip", Table: "nat", Chain: "C", Place: 3, Text: row.text}
		got := ""
		if ports, ok := r.SourcePorts(); ok {
			got = ports.String()
		}
		if got != row.ports {
			t.Errorf("%s: ports %q, want %q", row.text, got, row.ports)
		}
		if row.ports == "" {
			continue
		}
		if all := r.MakeAllPorts(); all != row.all {
			t.Errorf("%s:\n%q, want\n%q", row.text, all, row.all)
		}
	}
}
