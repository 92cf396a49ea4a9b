package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// flannelAndProxy are rules of kube-proxy, flannel and Docker, whose policy drops what flannel accepts.
const flannelAndProxy = `
IPT -P FORWARD DROP
for c in KUBE-FORWARD KUBE-SERVICES KUBE-PROXY-FIREWALL FLANNEL-FWD DOCKER DOCKER-USER DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2; do IPT -N $c; done
IPT -A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
IPT -A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
IPT -A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
IPT -A FORWARD -j DOCKER-USER
IPT -A FORWARD -j DOCKER-ISOLATION-STAGE-1
IPT -A FORWARD -o docker0 -j DOCKER
IPT -A FORWARD -i docker0 ! -o docker0 -j ACCEPT
IPT -A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
IPT -A KUBE-PROXY-FIREWALL -d 203.0.113.9/32 -p tcp -m tcp --dport 80 -j DROP
IPT -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
IPT -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
IPT -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
IPT -A KUBE-SERVICES -d 10.96.0.5/32 -p tcp -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
IPT -A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
IPT -A DOCKER-ISOLATION-STAGE-1 -j RETURN
IPT -A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
IPT -A DOCKER-USER -j RETURN
IPT -A FLANNEL-FWD -s 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
IPT -A FLANNEL-FWD -d 10.244.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
IPT -t raw -A PREROUTING -d 172.17.0.2/32 ! -i docker0 -j DROP
`

const flannelAndProxyNFT = `nft -f - <<'EOF'
table ip flannel-ipv4 {
	chain forward { type filter hook forward priority filter; policy accept; ip saddr 10.244.0.0/16 accept; ip daddr 10.244.0.0/16 accept; }
}
table ip kube-proxy {
	map no-endpoint-services {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.5 . tcp . 80 : goto reject-chain }
	}
	chain reject-chain { reject; }
	chain filter-forward { type filter hook forward priority filter - 10; policy accept; ct state new ip daddr . meta l4proto . th dport vmap @no-endpoint-services; ip daddr 10.96.0.0/12 drop; }
}
EOF`

// TestRulesThatEgressBypassesAreFound: the IPv4 and IPv6 packets are those of a node with eth0, flannel
// and the pods 10.244.1.0/24. IPT is each variant of iptables.
func TestRulesThatEgressBypassesAreFound(t *testing.T) {
	nftables := func(body string) string { return "nft -f - <<'EOF'\ntable inet fw {\n" + body + "\n}\nEOF" }
	forward := func(rules string) string {
		return nftables("chain f { type filter hook forward priority filter; policy accept; " + rules + "\n}")
	}
	for i, row := range []struct{ name, rules, want string }{
		{"no rules", "true", ""},
		{"flannel, kube-proxy and Docker", flannelAndProxy, ""},
		{"flannel and kube-proxy by nft", flannelAndProxyNFT, ""},
		{"one without flannel", "IPT -P FORWARD DROP; IPT -A FORWARD -s 10.244.0.0/16 -p tcp -j ACCEPT", "filter FORWARD: :FORWARD DROP"},
		{"accepted before the policy", "IPT -P FORWARD DROP; IPT -A FORWARD -o eth0 -m conntrack --ctstate NEW -j ACCEPT", ""},
		{"drop, reject, queue", `IPT -A FORWARD -s 10.244.0.0/16 -d 192.0.2.0/24 -j DROP
IPT -A FORWARD -p tcp -m tcp --dport 25 -j REJECT --reject-with icmp-port-unreachable
IPT -A FORWARD -o eth0 -j NFQUEUE --queue-num 3`, "filter FORWARD 1: -s 10.244.0.0/16 -d 192.0.2.0/24 -j DROP|" +
			"filter FORWARD 2: -p tcp -m tcp --dport 25 -j REJECT --reject-with icmp-port-unreachable|" +
			"filter FORWARD 3: -o eth0 -j NFQUEUE --queue-num 3"},
		{"marks", `IPT -t mangle -A PREROUTING -i cni0 -j MARK --set-xmark 0x1/0xffffffff
IPT -t mangle -A POSTROUTING -o eth0 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff
IPT -t mangle -A PREROUTING -p tcp -m tcp --dport 80 -j TPROXY --on-port 3129 --on-ip 0.0.0.0 --tproxy-mark 0x0/0x0`,
			"mangle PREROUTING 1: -i cni0 -j MARK --set-xmark 0x1/0xffffffff|" +
				"mangle PREROUTING 2: -p tcp -m tcp --dport 80 -j TPROXY|mangle POSTROUTING 1: -o eth0 -j CONNMARK --save-mark"},
		{"a chain of the operator", `IPT -N DOCKER-USER; IPT -N OUT; IPT -A FORWARD -j DOCKER-USER; IPT -A DOCKER-USER ! -i eth0 -g OUT
IPT -A OUT -d 198.51.100.0/24 -j RETURN; IPT -A OUT -m mark --mark 0x7 -j DROP; IPT -A DOCKER-USER -j DROP`,
			"filter OUT 2: -m mark --mark 0x7 -j DROP"}, // a goto does not come back
		{"a rule among Docker's", "IPT -N DOCKER-USER; IPT -A FORWARD -j DOCKER-USER; IPT -A DOCKER-USER -d 198.51.100.7/32 -j DROP",
			"filter DOCKER-USER 1: -d 198.51.100.7/32 -j DROP"},
		{"raw", "IPT -t raw -A PREROUTING -d 198.51.100.7/32 -j DROP", "raw PREROUTING 1: -d 198.51.100.7/32 -j DROP"},
		{"many", "for i in 1 2 3 4 5; do IPT -A FORWARD -d 198.51.100.$i -j DROP; done", "filter FORWARD 1: -d 198.51.100.1/32 -j DROP|" +
			"filter FORWARD 2: |filter FORWARD 3: |and 2 more"},
		{"pings", "IPT -A FORWARD -p tcp -j ACCEPT; IPT -A FORWARD -p icmp -m icmp --icmp-type 8 -j DROP; IPT -A FORWARD -p icmp -j DROP",
			"filter FORWARD 2: -p icmp -m icmp --icmp-type 8 -j DROP|filter FORWARD 3: -p icmp -j DROP"},
		{"nft pings", forward("meta l4proto { icmp, ipv6-icmp } drop\nicmp type echo-request drop\nmeta l4proto != { tcp, udp } drop"),
			"meta l4proto { icmp, ipv6-icmp } drop|icmp type echo-request drop|meta l4proto != { tcp, udp } drop"},
		{"rules of other packets", `IPT -A FORWARD -m conntrack --ctstate INVALID -j DROP
IPT -A FORWARD -p icmp -m icmp --icmp-type 3 -j DROP
IPT -A FORWARD -p sctp -j DROP
IPT -A FORWARD -i eth0 -j DROP
IPT -A FORWARD -i lo -j DROP
IPT -A FORWARD -o docker0 -j DROP
IPT -A FORWARD -s 192.168.0.0/16 -j DROP
IPT -A FORWARD ! -s 10.0.0.0/8 -j DROP
IPT -A FORWARD -d 10.244.0.0/16 -j DROP
IPT -A FORWARD -m addrtype --dst-type LOCAL -j DROP
IPT -t raw -A PREROUTING -m rpfilter --invert -j DROP
IPT -A INPUT -j DROP
IPT -A FORWARD -p tcp -m tcp --dport 80 -j LOG
IPT -A FORWARD -s 10.244.0.0/16 -j ACCEPT
IPT -A FORWARD -j DROP`, ""},
		{"a loop of chains", `IPT -N A; IPT -N B; IPT -A FORWARD -p tcp -j A; IPT -A FORWARD -j B; IPT -A A -j B
IPT -A B -d 10.244.0.0/16 -j RETURN; IPT -A B -j DROP`, "filter B 2: -j DROP"},
		{"nft", forward(`
ip saddr 10.244.0.0/16 ip daddr 192.0.2.0/24 drop
meta mark set 0x00000001
tcp dport { 25, 465 } reject
ct mark set 0x00000002`), "nft inet fw f handle 2: ip saddr 10.244.0.0/16 ip daddr 192.0.2.0/24 drop|meta mark set 0x00000001|" +
			"tcp dport { 25, 465 } reject|and 1 more"},
		{"nft policy", nftables("chain f { type filter hook forward priority filter; policy drop; tcp dport 443 accept; }"),
			"nft inet fw f: policy drop"},
		{"nft policy with all accepted", nftables("chain f { type filter hook forward priority filter; policy drop; " +
			"ct state established,related accept; ip saddr 10.244.0.0/16 accept; }"), ""},
		{"nft maps and chains", nftables(`
map m { type ifname : verdict; elements = { "cni0" : jump pods, "eth0" : jump outside } }
chain pods { tcp dport vmap { 25 : drop, 80 : accept }; }
chain outside { drop; }
chain f { type filter hook prerouting priority raw; ct state vmap { established : accept, invalid : drop }; iifname vmap @m; meta l4proto tcp drop; }`),
			"tcp dport vmap { 25 : drop, 80 : accept }|meta l4proto tcp drop"},
		{"nft rules of other packets", forward(`
ct state invalid drop
ct state { invalid, untracked } drop
icmp type { echo-reply, destination-unreachable } drop
meta l4proto sctp drop
fib saddr . iif oif missing drop
iifname { "eth0", "lo" } drop
oifname "docker0" drop
ip saddr 192.168.0.0/16 drop
ip6 daddr 2001:db8::/32 drop
ip daddr { 10.244.0.0/16, 224.0.0.0/4 } drop
fib daddr type local drop
tcp dport 80 log prefix "drop mark set "
ip saddr 10.244.0.0/16 accept
drop`) + "\nnft 'add chain inet fw o { type filter hook output priority 0; }; add rule inet fw o drop'", ""},
		{"a set", nftables("set bad { type ipv4_addr; flags interval; elements = { 10.244.0.0/16, 192.0.2.0/24 } }\n" +
			"chain f { type filter hook postrouting priority mangle; ip daddr @bad drop; }"), "ip daddr @bad drop"},
		{"routing rules", `ip rule add fwmark 0x1/0xff lookup 100 priority 500; ip rule add fwmark 0x2 from 192.168.0.0/16 lookup 100
ip rule add fwmark 0x3 iif eth0 lookup 100; ip rule add fwmark 0x4 to 10.244.0.0/16 lookup 100; ip rule add not fwmark 0x5 lookup main
ip rule add from 10.244.0.0/16 lookup main; ip -6 rule add fwmark 0x6 lookup 100`, "ip rule: 500: from all fwmark 0x1/0xff lookup 100"},
	} {
		for _, variant := range []string{"iptables-nft", "iptables-legacy"} {
			if variant == "iptables-legacy" && !strings.Contains(row.rules, "IPT") {
				continue
			}
			t.Run(row.name+"/"+variant, func(t *testing.T) {
				ns := newNamespace(t, fmt.Sprintf("bypass%d", i))
				inside(t, ns, "ip link add eth0 type veth peer name far; ip link add cni0 type bridge\n"+strings.ReplaceAll(row.rules, "IPT", variant))
				n, _ := examine(t, ns)
				n.Namespaces[0].Report.Namespace.Own = true
				n.Traffic = &Traffic{Bypass: bypassOfFlannel}
				found := Examine(n, "egress-bypasses-rules")
				if row.want == "" {
					if len(found) > 0 {
						t.Fatalf("found %q", found[0].Evidence)
					}
					return
				}
				f := onlyFinding(t, found, "egress-bypasses-rules")
				want := strings.Split(row.want, "|")
				if len(f.Evidence) != len(want) || f.Severity != Warning {
					t.Fatalf("%s: evidence %q, want %q", f.Severity, f.Evidence, want)
				}
				for i, quote := range want {
					if !strings.Contains(f.Evidence[i], quote) {
						t.Errorf("evidence %q, want %q", f.Evidence[i], quote)
					}
				}
				n.Traffic.Bypass = EgressBypass{}
				if found := Examine(n, "egress-bypasses-rules"); len(found) > 0 {
					t.Errorf("without egress: %+v", found)
				}
			})
		}
	}
}

var bypassOfFlannel = EgressBypass{
	Sources: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
	Keeps:   []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("::/0")},
	Devices: []string{"eth0"},
}

// TestRulesForEachFamilyAreFound: packets of IPv6 meet rules of ip6tables, and leave by a second device.
func TestRulesForEachFamilyAreFound(t *testing.T) {
	ns := newNamespace(t, "bypass-v6")
	inside(t, ns, `ip link add eth0 type veth peer name far; ip link add flannel.1 type vxlan id 1 dstport 8472 dev eth0
ip6tables-nft -P FORWARD DROP; ip6tables-nft -A FORWARD -o flannel.1 -j REJECT; ip6tables-nft -A FORWARD -o eth0 -j ACCEPT
iptables-nft -A FORWARD -j DROP; ip -6 rule add fwmark 0x6 lookup 100 priority 500`)
	n, _ := examine(t, ns)
	n.Namespaces[0].Report.Namespace.Own = true
	n.Traffic = &Traffic{Bypass: EgressBypass{
		Sources: []netip.Prefix{netip.MustParsePrefix("fd00:1::/64")}, Keeps: []netip.Prefix{netip.MustParsePrefix("fd00::/16")},
		Devices: []string{"eth0", "flannel.1"},
	}}
	f := onlyFinding(t, Examine(n), "egress-bypasses-rules")
	want := []string{
		"ip6tables-nft filter FORWARD 1: -o flannel.1 -j REJECT --reject-with icmp6-port-unreachable",
		"ip -6 rule: 500: from all fwmark 0x6 lookup 100",
	}
	if !slices.Equal(f.Evidence, want) {
		t.Errorf("evidence %q, want %q", f.Evidence, want)
	}
}
