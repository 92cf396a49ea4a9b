package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// mustSave parses rules of iptables' table nat.
func mustSave(t *testing.T, command, family, rules string) *Ruleset {
	t.Helper()
	rs := newRuleset()
	if _, err := rs.parseSave(command, family, []byte("*nat\n:POSTROUTING ACCEPT [0:0]\n"+rules+"COMMIT\n"), anyTable); err != nil {
		t.Fatal(err)
	}
	return rs
}

func mustNFT(t *testing.T, text string) *Ruleset {
	t.Helper()
	rs := newRuleset()
	var b strings.Builder
	for i, line := range strings.Split(text, "\n") {
		if s := strings.TrimSpace(line); s != "" && !strings.HasSuffix(s, "{") && s != "}" && !strings.HasPrefix(s,
			"type ") && !strings.HasPrefix(s, "elements") {
			line = fmt.Sprintf("%s # handle %d", line, i+1)
		}
		b.WriteString(line + "\n")
	}
	if hidden := rs.parseNFT([]byte(b.String()), map[string]bool{}); hidden != nil {
		t.Fatal(hidden)
	}
	return rs
}

const flannelSave = `:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.1.0/24 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.1.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
`

const kubeProxySave = `:KUBE-POSTROUTING - [0:0]
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
`

const bridgeSave = `:CNI-0ff9aa0ef7c5b3f2a1c7e4d0 - [0:0]
-A POSTROUTING -s 10.88.0.5/32 -m comment --comment "name: \"podnet\" id: \"abc\"" -j CNI-0ff9aa0ef7c5b3f2a1c7e4d0
-A CNI-0ff9aa0ef7c5b3f2a1c7e4d0 -d 10.88.0.0/16 -m comment --comment "name: \"podnet\" id: \"abc\"" -j ACCEPT
-A CNI-0ff9aa0ef7c5b3f2a1c7e4d0 ! -d 224.0.0.0/4 -m comment --comment "name: \"podnet\" id: \"abc\"" -j MASQUERADE
`

const masqAgentSave = `:IP-MASQ - [0:0]
-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs traffic to our chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ
-A IP-MASQ -d 169.254.0.0/16 -m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" -m addrtype ! --dst-type LOCAL -j RETURN
-A IP-MASQ -d 10.0.0.0/8 -m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" -m addrtype ! --dst-type LOCAL -j RETURN
-A IP-MASQ -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -m addrtype ! --dst-type LOCAL -j MASQUERADE --random-fully
`

const dockerSave = `:DOCKER - [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE
`

const calicoSave = `:cali-POSTROUTING - [0:0]
:cali-nat-outgoing - [0:0]
-A POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
-A cali-POSTROUTING -m comment --comment "cali:Z-c7XtVd2Bq7s_hA" -j cali-nat-outgoing
-A cali-nat-outgoing -m comment --comment "cali:flqWnvo8yq4ULQLa" -m set --match-set cali40masq-ipam-pools src -m set ! --match-set cali40all-ipam-pools dst -j MASQUERADE --random-fully
`

const awsSave = `:AWS-SNAT-CHAIN-0 - [0:0]
-A POSTROUTING -m comment --comment "AWS SNAT CHAIN" -j AWS-SNAT-CHAIN-0
-A AWS-SNAT-CHAIN-0 -d 192.168.0.0/16 -m comment --comment "AWS SNAT CHAIN" -j RETURN
-A AWS-SNAT-CHAIN-0 ! -o vlan+ -m comment --comment "AWS, SNAT" -m addrtype ! --dst-type LOCAL -j SNAT --to-source 192.168.1.7 --random-fully
`

const flannelNFT = `table ip flannel-ipv4 {
	chain postrtg {
		type nat hook postrouting priority srcnat; policy accept;
		meta mark & 0x00004000 == 0x00004000 return
		ip saddr 10.244.1.0/24 ip daddr 10.244.0.0/16 return
		ip saddr 10.244.0.0/16 ip daddr 10.244.1.0/24 return
		ip saddr != 10.244.1.0/24 ip daddr 10.244.0.0/16 return
		ip saddr 10.244.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random
		ip saddr != 10.244.0.0/16 ip daddr 10.244.0.0/16 masquerade fully-random
	}
}`

const bridgeNFT = `table inet cni_plugins_masquerade {
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip daddr 224.0.0.0/4 return
		ip6 daddr ff00::/8 return
		goto masq_checks
	}
	chain masq_checks {
		ip saddr 10.88.0.5 ip daddr != 10.88.0.0/16 masquerade comment "6fd1, net: podnet, if: eth0, id: abc"
		ip6 saddr fd00:88::5 ip6 daddr != fd00:88::/64 masquerade comment "6fd1, net: podnet, if: eth0, id: abc"
	}
}`

const kubeProxyNFT = `table ip kube-proxy {
	chain masquerading {
		meta mark & 0x00004000 == 0x00000000 return
		meta mark set meta mark ^ 0x00004000
		masquerade fully-random
	}
	chain nat-postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		jump masquerading
	}
}`

// TestMasquerade evaluates what programs really write. The expected destinations are what each program
// documents.
func TestMasquerade(t *testing.T) {
	type probe struct{ from, to string }
	for _, tt := range []struct {
		name        string
		rules       *Ruleset
		masqueraded []probe
		keeps       []probe
		unclear     int
	}{
		{"flannel", mustSave(t, "iptables-legacy", "ip", flannelSave),
			[]probe{{"10.244.1.5", "198.51.100.7"}, {"10.244.1.5", "192.0.2.1"}, {"10.244.1.5", "169.254.169.254"}, {"192.0.2.9", "10.244.2.5"}},
			[]probe{{"10.244.1.5", "10.244.2.5"}, {"10.244.1.5", "224.0.0.1"}, {"192.0.2.9", "198.51.100.7"}, {"192.0.2.9", "10.244.1.5"}}, 0},
		{"flannel after kube-proxy", mustSave(t, "iptables-nft", "ip", kubeProxySave+flannelSave),
			[]probe{{"10.244.1.5", "198.51.100.7"}}, []probe{{"10.244.1.5", "10.244.2.5"}}, 0},
		{"flannel by nft", mustNFT(t, flannelNFT),
			[]probe{{"10.244.1.5", "198.51.100.7"}}, []probe{{"10.244.1.5", "10.244.2.5"}, {"10.244.1.5", "224.0.0.1"}}, 0},
		{"kube-proxy alone", mustNFT(t, kubeProxyNFT), nil, []probe{{"10.244.1.5", "198.51.100.7"}}, 0},
		{"bridge plugin", mustSave(t, "iptables-nft", "ip", bridgeSave),
			[]probe{{"10.88.0.5", "198.51.100.7"}}, []probe{{"10.88.0.5", "10.88.3.3"}, {"10.88.0.6", "198.51.100.7"}}, 0},
		{"bridge plugin by nft", mustNFT(t, bridgeNFT),
			[]probe{{"10.88.0.5", "198.51.100.7"}, {"fd00:88::5", "2001:db8::1"}},
			[]probe{{"10.88.0.5", "10.88.3.3"}, {"10.88.0.6", "198.51.100.7"}, {"fd00:88::5", "ff02::1"}, {"fd00:88::5", "fd00:88::9"}}, 0},
		{"ip-masq-agent", mustSave(t, "iptables-legacy", "ip", masqAgentSave),
			[]probe{{"10.1.2.3", "198.51.100.7"}}, []probe{{"10.1.2.3", "10.9.9.9"}, {"10.1.2.3", "169.254.169.254"}}, 0},
		{"Docker", mustSave(t, "iptables-nft", "ip", dockerSave),
			[]probe{{"172.17.0.2", "198.51.100.7"}}, []probe{{"10.244.1.5", "198.51.100.7"}}, 0},
		{"Calico, whose sets are not read", mustSave(t, "iptables-nft", "ip", calicoSave), nil, []probe{{"10.244.1.5", "198.51.100.7"}}, 1},
		{"AWS VPC CNI, with a fixed address", mustSave(t, "iptables-nft", "ip", awsSave), nil, []probe{{"192.168.1.9", "198.51.100.7"}}, 1},
		{"a range of ports", mustSave(t, "iptables-nft", "ip", "-A POSTROUTING -s 10.244.0.0/16 -j MASQUERADE --to-ports 1024-2048\n"),
			nil, []probe{{"10.244.1.5", "198.51.100.7"}}, 1},
		{"one protocol", mustSave(t, "iptables-nft", "ip", "-A POSTROUTING -d 198.51.100.0/24 -p tcp -m tcp --dport 25 -j ACCEPT\n"+flannelSave),
			[]probe{{"10.244.1.5", "203.0.113.1"}}, []probe{{"10.244.1.5", "198.51.100.7"}}, 1},
		{"another device", mustSave(t, "iptables-nft", "ip", "-A POSTROUTING -o wg0 -j MASQUERADE\n"), nil, []probe{{"10.244.1.5",
			"198.51.100.7"}}, 0},
		{"the external device", mustSave(t, "iptables-nft", "ip", "-A POSTROUTING -o eth0 -j MASQUERADE\n"), []probe{{"10.244.1.5",
			"198.51.100.7"}}, nil, 0},
		{"a goto", mustSave(t, "iptables-nft", "ip", ":X - [0:0]\n-A POSTROUTING -d 198.51.100.0/24 -g X\n"+
			"-A POSTROUTING -s 10.1.0.0/16 -j MASQUERADE\n-A X -d 198.51.100.7/32 -j RETURN\n"),
			[]probe{{"10.1.1.1", "203.0.113.1"}}, []probe{{"10.1.1.1", "198.51.100.7"}, {"10.1.1.1", "198.51.100.8"}}, 0},
		{"a mark that a rule sets", mustSave(t, "iptables-nft", "ip", "-A POSTROUTING -d 198.51.100.0/24 -j MARK --set-xmark 0x1/0x1\n"+
			"-A POSTROUTING -m mark --mark 0x1/0x1 -j RETURN\n-A POSTROUTING -s 10.1.0.0/16 -j MASQUERADE\n"),
			[]probe{{"10.1.1.1", "203.0.113.1"}}, []probe{{"10.1.1.1", "198.51.100.7"}}, 1},
		{"a verdict map", mustNFT(t, "table ip x {\n\tchain p {\n\t\ttype nat hook postrouting priority 90; policy accept;\n"+
			"\t\tip daddr vmap @v\n\t\tip saddr 10.1.0.0/16 masquerade\n\t}\n}"), nil, []probe{{"10.1.1.1", "198.51.100.7"}}, 1},
		{"an accept ends its base chain alone", mustNFT(t, "table ip x {\n\tchain p {\n"+
			"\t\ttype nat hook postrouting priority 90; policy accept;\n\t\taccept\n"+
			"\t}\n\tchain q {\n\t\ttype nat hook postrouting priority srcnat; policy accept;\n\t\tmasquerade\n\t}\n}"),
			[]probe{{"10.1.1.1", "198.51.100.7"}}, nil, 0},
		{"replies, and Services", mustNFT(t, "table inet x {\n\tchain p {\n\t\ttype nat hook postrouting priority srcnat; policy accept;\n"+
			"\t\tct state established,related masquerade\n\t\tct status dnat masquerade\n\t\tip6 saddr fd00::/64 masquerade\n\t}\n}"),
			[]probe{{"fd00::1", "2001:db8::1"}}, []probe{{"10.1.1.1", "198.51.100.7"}, {"fd01::1", "2001:db8::1"}}, 0},
		{"Spillway's own", mustNFT(t, "table inet spillway {\n\tchain leaving {\n"+
			"\t\ttype nat hook postrouting priority 90; policy accept;\n\t\tmasquerade fully-random\n\t}\n}"),
			nil, []probe{{"10.244.1.5", "198.51.100.7"}}, 0},
		{"a set", mustNFT(t, "table ip x {\n\tset pods {\n\t\ttype ipv4_addr\n\t\tflags interval\n"+
			"\t\telements = { 10.1.0.0/16, 10.2.0.0/16 }\n\t}\n\tchain p {\n"+
			"\t\ttype nat hook postrouting priority srcnat + 5; policy accept;\n"+
			"\t\tip saddr @pods ip daddr != { 10.0.0.0/8, 192.168.0.0/16 } counter packets 1 bytes 2 masquerade\n\t}\n}"),
			[]probe{{"10.2.3.4", "198.51.100.7"}}, []probe{{"10.3.3.4", "198.51.100.7"}, {"10.1.1.1", "192.168.7.7"}}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, err := tt.rules.Masquerade([]string{"eth0"})
			if err != nil {
				t.Fatal(err)
			}
			masqueraded := func(p probe) bool {
				return slices.ContainsFunc(m.Masqueraded, func(w MasqueradeRange) bool {
					return w.Sources.Contains(netip.MustParseAddr(p.from)) && w.Outside.Contains(netip.MustParseAddr(p.to))
				})
			}
			for _, p := range tt.masqueraded {
				if !masqueraded(p) {
					t.Errorf("%s -> %s keeps its address", p.from, p.to)
				}
			}
			for _, p := range tt.keeps {
				if masqueraded(p) {
					t.Errorf("%s -> %s is masqueraded", p.from, p.to)
				}
			}
			if len(m.Unclear) != tt.unclear {
				t.Errorf("unclear: %v, want %d rules", m.Unclear, tt.unclear)
			}
		})
	}
}

// TestMasqueradeTranslated: destinations that other rules may replace are no outside.
func TestMasqueradeTranslated(t *testing.T) {
	prerouting := ":PREROUTING ACCEPT [0:0]\n"
	for _, tt := range []struct {
		name      string
		rules     *Ruleset
		some, not []string
	}{
		{"kube-proxy", mustSave(t, "iptables-nft", "ip", prerouting+`:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-NODEPORTS - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "x" -m tcp --dport 443 -j KUBE-SVC-A
-A KUBE-SERVICES -m comment --comment "nodeports" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-SVC-A
-A KUBE-SVC-A -p tcp -j DNAT --to-destination 10.244.1.5:6443
`), []string{"10.96.0.1"}, []string{"198.51.100.7", "10.96.0.2"}},
		{"portmap", mustSave(t, "iptables-nft", "ip", prerouting+`:CNI-HOSTPORT-DNAT - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.1.5:80
`), nil, []string{"198.51.100.7"}},
		{"a transparent proxy", mustSave(t, "iptables-nft", "ip",
			prerouting+"-A PREROUTING -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 3128\n"),
			[]string{"198.51.100.7"}, nil},
		{"from outside alone", mustSave(t, "iptables-nft", "ip",
			prerouting+"-A PREROUTING -i eth0 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.1\n"),
			nil, []string{"198.51.100.7"}},
		{"kube-proxy by nft", mustNFT(t, "table ip kube-proxy {\n\tchain services {\n"+
			"\t\tip daddr . meta l4proto . th dport vmap @service-ips\n\t}\n\tchain nat-prerouting {\n"+
			"\t\ttype nat hook prerouting priority dstnat; policy accept;\n\t\tjump services\n\t}\n}"),
			[]string{"198.51.100.7"}, nil},
	} {
		m, err := tt.rules.Masquerade([]string{"eth0"})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range tt.some {
			if !m.Translated.Contains(netip.MustParseAddr(a)) {
				t.Errorf("%s: %s counts as outside", tt.name, a)
			}
		}
		for _, a := range tt.not {
			if m.Translated.Contains(netip.MustParseAddr(a)) {
				t.Errorf("%s: %s counts as translated", tt.name, a)
			}
		}
	}
}
