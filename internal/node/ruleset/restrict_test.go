package ruleset

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

var outwardOfTests = Outward{
	Sources: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, Keeps: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
	Devices: []string{"eth0"}, Foreign: []string{"eth0"},
}

// TestRestrictionsOfHugeRulesets: each of them is compared in part, or all of its rules are.
func TestRestrictionsOfHugeRulesets(t *testing.T) {
	repeat := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format, i>>8&255, i&255)
		}
		return b.String()
	}
	var chains, jumps strings.Builder
	for i := range 12 {
		fmt.Fprintf(&chains, ":C%d - [0:0]\n", i)
		if i < 11 {
			jumps.WriteString(repeat(60, fmt.Sprintf("-A C%d -d 198.%%d.%%d.0/24 -p tcp -j C%d\n", i, i+1)))
		}
	}
	for _, row := range []struct {
		name, rules string
		most        int
		complete    bool
	}{
		{"drops", repeat(1000, "-A FORWARD -d 198.%d.%d.0/24 -j DROP\n"), 1000, true},
		{"too many drops", repeat(2*maxSteps, "-A FORWARD -d 198.%d.%d.0/25 -j DROP\n"), maxSteps, false},
		{"too many sources", repeat(2*maxSteps, "-A FORWARD -s 10.244.1.%d -d 198.7.%d.0/24 -j ACCEPT\n") + "-A FORWARD -j DROP\n", 0, false},
		{"jumps to chains of jumps", chains.String() + "-A FORWARD -j C0\n" + jumps.String() + "-A C11 -j DROP\n", 1, true},
	} {
		rs := newRuleset()
		if _, err := rs.parseSave("iptables-nft", "ip", []byte("*filter\n:FORWARD ACCEPT [0:0]\n"+row.rules+"COMMIT\n"), anyTable); err != nil {
			t.Fatal(err)
		}
		list, complete := rs.Restrictions(outwardOfTests)
		if len(list) > row.most || complete != row.complete || row.complete && len(list) != row.most {
			t.Errorf("%s: %d rules, complete %v; want %d, %v", row.name, len(list), complete, row.most, row.complete)
		}
	}
}

// TestRestrictionsOfMatches: a rule counts if it may concern packets of pods' connections to the outside.
func TestRestrictionsOfMatches(t *testing.T) {
	for rule, counts := range map[string]bool{
		"-p tcp":                                 true,
		"-p sctp":                                false,
		"-p icmp -m icmp --icmp-type echo-reply": false,
		"-p icmp -m icmp ! --icmp-type echo-reply":     true,
		"-p ipv6-icmp -m icmp6 --icmpv6-type 129":      false,
		"-m conntrack --ctstate INVALID":               false,
		"-m conntrack --ctstate NEW,ESTABLISHED":       true,
		"-m state --state INVALID":                     false,
		"-m state ! --state NEW,RELATED,ESTABLISHED":   false,
		"-m mark --mark 0x1":                           true,
		"-m rpfilter --invert":                         false,
		"-m comment --comment --state -m unknown --on": true,
	} {
		rs := newRuleset()
		text := "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD " + rule + " -j DROP\nCOMMIT\n"
		if _, err := rs.parseSave("iptables-nft", "ip", []byte(text), anyTable); err != nil {
			t.Fatal(err)
		}
		if list, complete := rs.Restrictions(outwardOfTests); (len(list) > 0) != counts || !complete {
			t.Errorf("%s: %d rules, complete %v; want %v", rule, len(list), complete, counts)
		}
	}
}
