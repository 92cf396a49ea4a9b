package ruleset

import (
	"net/netip"
	"strings"
	"testing"
)

// FuzzRuleset reads rules of any program, and runs all of doctor's checks on them. A
// command must be one line.
func FuzzRuleset(f *testing.F) {
	for _, s := range []string{
		"*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SVC - [0:0]\n-A PREROUTING -p udp -m udp --dport 69 -m comment --comment \"a -j B\" -j " +
			"KUBE-SVC\n-A KUBE-SVC -p udp -j DNAT --to-destination 10.0.0.1:69\n-A POSTROUTING -s 10.0.0.1/32 -j SNAT --to-source 10.0.0.1\n-A " +
			"POSTROUTING -p tcp -j MASQUERADE --to-ports 1-2\n-A POSTROUTING -p tcp -j SNAT --to-source [::1]:1-2\nCOMMIT\n# Table `filter' is " +
			"incompatible, use 'nft' tool.\n",
		"table ip kube-proxy { # handle 7\n\tmap service-ips { # handle 1\n\t\ttype ipv4_addr . inet_proto . inet_service : " +
			"verdict\n\t\telements = { 10.96.0.1 . udp . 69 comment \"a, b\" : goto svc,\n\t\t\t     10.96.0.2 . 17 . 53 : goto svc " +
			"}\n\t}\n\tchain svc { # handle 2\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n\t\tudp dport 69 dnat to " +
			"10.0.0.1:69 # handle 9\n\t\tmasquerade random # handle 10\n\t\tsnat to 10.0.0.1:1-2 comment \"to :3\" # handle 12\n\t\tmasquerade " +
			"comment \"\" to :1-2 # handle 13\n\t\txt target \"LOG\" # handle 11\n\t}\n}\n",
		"*nat\n:A ACCEPT\n-A A -j A\n-A A --to-source -s -j SNAT --dport\n-A A --comment \"\\\n-A A \"\\\\\n",
		"table x y {\nmap @ {\nelements = {}\n}}\n", "*\n:\n-A \n",
	} {
		f.Add([]byte(s), true)
		f.Add([]byte(s), false)
	}
	f.Fuzz(func(t *testing.T, text []byte, nft bool) {
		rs := newRuleset()
		if nft {
			rs.parseNFT(text, map[string]bool{"ip known": true})
		} else {
			_, _ = rs.parseSave("iptables-nft", "ip", text, anyTable)
			incompatible(text)("nat")
		}
		sum := 0
		for _, n := range rs.Counts() {
			sum += n
		}
		if sum > len(rs.Rules) {
			t.Errorf("%d rules held of %d", sum, len(rs.Rules))
		}
		rs.Frontends("udp", 69)
		rs.FirstPacket()
		rs.Assigned("tftp", 69)
		rs.Addresses()
		rs.Restrictions(Outward{Sources: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Devices: []string{"eth0"}})
		for _, r := range rs.Rules {
			r.SourceNAT()
			r.DropsInvalid()
			r.Owner()
			r.Where()
			r.SourcePorts()
			for _, line := range []string{r.MakeRandom(), r.MakeAllPorts()} {
				if strings.Contains(line, "\n") {
					t.Errorf("command %q", line)
				}
			}
		}
	})
}
