package doctor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/internal/node/ruleset"
)

// Tables of nft with iptables' names and other chains: iptables-nft-save succeeds and
// shows nothing of them.
func TestTablesThatOnlyLookLikeIptablesAreRead(t *testing.T) {
	ns := newNamespace(t, "native")
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
	inside(t, ns, "nft 'add table ip other; add chain ip other o { type nat hook output priority -90; }; add rule ip other o udp dport "+
		"5353 dnat to 10.9.9.9'")
	expectNone(t, "stale-udp-entries", ns) // the endpoint is mentioned: the entry lives
	netnstest.Within(t, ns.Names[0], func() { sendNothing(t) })
	_, findings := examine(t, ns)
	onlyFinding(t, findings, "helper-missing")
	if f := onlyFinding(t, findings, "tcp-not-liberal"); f.Severity != Warning {
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
	expectNone(t, "masquerade-not-random", ns)
}

// Where rules could not be read, their translations are unknown: --fix
// deletes nothing.
func TestStaleEntriesAreLeftAloneWhereRulesWereNotRead(t *testing.T) {
	ns := newNamespace(t, "unread")
	inside(t, ns, outward+`
nft 'add table ip nat; add chain ip nat o { type nat hook output priority -100; }; add rule ip nat o udp dport 53 dnat to 10.244.0.2'`)
	send(t, ns, "10.96.0.10:53")
	inside(t, ns, "ip route add unreachable 10.244.0.0/16")
	n, findings := examine(t, ns)
	if f := onlyFinding(t, findings, "stale-udp-entries"); !f.Fixable {
		t.Errorf("%+v", f)
	}
	n.Namespaces[0].AllRulesRead, n.Namespaces[0].Rules = false, &ruleset.Ruleset{}
	f := onlyFinding(t, Examine(n), "stale-udp-entries")
	if done := ApplyFixes(t.Context(), []Finding{f}); f.Fixable || len(done) > 0 ||
		!strings.Contains(strings.Join(f.Evidence, "\n"), "not all rules of this namespace could be read") {
		t.Errorf("%+v: %+v", f, done)
	}
	// This is the state without nft on the node.
	r := asChild(t, ns, []string{"PATH=/nowhere"}, "")
	if f := onlyFinding(t, r.Findings, "stale-udp-entries"); f.Fixable || len(r.Fixed) > 0 {
		t.Errorf("%+v: %+v", f, r.Fixed)
	}
}

// Any user may choose names and comments: a pasted command must do only its own work.
func TestPrintedCommandsAreSafeToPaste(t *testing.T) {
	marker := t.TempDir() + "/ran"
	name := fmt.Sprintf("spw-doctor-%d-$(touch ${HOME}ran);touch x", os.Getpid())
	if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	list, _ := conntrack.Namespaces()
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(name) })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, list)
	}
	ns := list[i]
	comment := "$(touch " + marker + ") `touch " + marker + "`; touch " + marker + " it's \"so\"  wide"
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("nsenter", append([]string{"--net=/run/netns/" + name}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
		return string(out)
	}
	run("iptables-legacy", "-t", "nat", "-A", "POSTROUTING", "-m", "comment", "--comment", comment, "-j", "MASQUERADE")
	before := run("iptables-legacy-save", "-t", "nat")
	n, err := Load(t.Context(), Config{Namespaces: func() ([]conntrack.Namespace, error) { return []conntrack.Namespace{ns}, nil }})
	if err != nil {
		t.Fatal(err)
	}
	f := onlyFinding(t, Examine(n), "masquerade-not-random")
	// Off the page, with its line breaks.
	var b strings.Builder
	if err := NewReport(n, []Finding{f}).Write(&b); err != nil {
		t.Fatal(err)
	}
	got := b.String()
	paste := got[strings.Index(got, "nsenter"):strings.LastIndex(got, "--random-fully")] + "--random-fully"
	cmd := exec.Command("sh", "-ec", paste)
	cmd.Dir = t.TempDir()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", paste, err, out)
	}
	if left, _ := os.ReadDir(cmd.Dir); len(left) > 0 {
		t.Errorf("%s made %v", paste, left)
	}
	if _, err := os.Stat(marker); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s ran what stands in the comment", paste)
	}
	rule := func(saved string) string { return saved[strings.Index(saved, "-A "):strings.Index(saved, "-j MASQ")] }
	if after := run("iptables-legacy-save", "-t", "nat"); rule(after) != rule(before) || !strings.Contains(after, "--random-fully") {
		t.Errorf("the rule was\n%s and is\n%s", before, after)
	}
	if !escape.Shown(strings.ReplaceAll(got, "\n", "")) {
		t.Errorf("page: %q", got)
	}
}

func TestAPageHasNoControlCharacters(t *testing.T) {
	evil := "a\x1b[2J\nb"
	r := NewReport(&Node{Problems: []Problem{{What: evil, Namespaces: []string{evil}}}}, []Finding{
		{ID: "x", Severity: Warning, Namespace: evil, Title: evil, Evidence: []string{evil}, Packets: evil, Remedy: evil,
			Commands: []string{"echo " + escape.Shell(evil)}}})
	r.Fixed = []Fixed{{Does: evil, Error: evil}}
	if got := printed(t, r); !escape.Shown(strings.ReplaceAll(got, "\n", "")) || !strings.Contains(got, `a\x1b[2J\nb`) {
		t.Errorf("page: %q", got)
	}
}
