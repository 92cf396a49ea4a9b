package doctor

import (
	"strings"
	"testing"

	"spillway.dev/spillway/internal/doctor/ruleset"
)

// Tables of nft that have the names of iptables' and chains of their own:
// iptables-nft-save ends well and shows nothing of them.
func TestTablesThatOnlyLookLikeIptablesAreRead(t *testing.T) {
	ns := place(t, "native")
	inside(t, ns, outward+`
nft -f - <<'EOF'
table ip nat {
	chain mine { type nat hook postrouting priority srcnat; ip saddr 10.0.0.0/8 masquerade; }
	chain theirs { type nat hook output priority -100; udp dport 53 dnat to 10.244.0.2; udp dport 69 dnat to 10.244.0.4:69; }
}
table ip filter {
	chain mine { type filter hook forward priority 0; ct state invalid drop; }
}
table ip6 nat {
	chain mine { type nat hook postrouting priority srcnat; masquerade; }
}
EOF
# And what iptables put into the same table is kept.
iptables-nft -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE`)
	send(t, ns, "10.96.0.10:53")
	gone(t, "stale-udp-entries", ns) // the endpoint is mentioned: the entry lives
	enter(t, ns, func() { sendNothing(t) })
	_, findings := visit(t, ns)
	the(t, findings, "helper-missing")
	if f := the(t, findings, "tcp-not-liberal"); f.Severity != Warning {
		t.Errorf("the rule that drops INVALID is not seen: %+v", f)
	}
	rules := 0.0
	for _, f := range withID(findings, "masquerade-not-random") {
		rules += f.Numbers["rules"]
		shell(t, strings.Join(f.Commands, "\n"))
	}
	if rules != 3 {
		t.Errorf("%v rules masquerade, want 3", rules)
	}
	gone(t, "masquerade-not-random", ns)
}

// Where rules could not be read nobody knows what they translate to: --fix
// deletes nothing.
func TestStaleEntriesAreLeftAloneWhereRulesWereNotRead(t *testing.T) {
	ns := place(t, "unread")
	inside(t, ns, outward+`
nft 'add table ip nat; add chain ip nat o { type nat hook output priority -100; }; add rule ip nat o udp dport 53 dnat to 10.244.0.2'`)
	send(t, ns, "10.96.0.10:53")
	inside(t, ns, "ip route add unreachable 10.244.0.0/16")
	n, findings := visit(t, ns)
	if f := the(t, findings, "stale-udp-entries"); !f.Fixable {
		t.Errorf("%+v", f)
	}
	n.Namespaces[0].RulesWhole, n.Namespaces[0].Rules = false, &ruleset.Ruleset{}
	f := the(t, Examine(n), "stale-udp-entries")
	if done := Mend(t.Context(), []Finding{f}); f.Fixable || len(done) > 0 || !strings.Contains(strings.Join(f.Evidence, "\n"), "not all rules of this namespace could be read") {
		t.Errorf("%+v: %+v", f, done)
	}
	// As it is without nft on the node.
	r := asChild(t, ns, []string{"PATH=/nowhere"}, "")
	if f := the(t, r.Findings, "stale-udp-entries"); f.Fixable || len(r.Fixed) > 0 {
		t.Errorf("%+v: %+v", f, r.Fixed)
	}
}
