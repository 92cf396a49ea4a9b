package doctor

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/internal/node/ruleset"
)

// Each test creates the problem in a namespace of its own and sees the finding. It fixes
// the problem by --fix or by the printed command, and checks that the finding has
// disappeared.

func TestATableThatIsFullIsFoundAndItsLimitRaised(t *testing.T) {
	restore(t, conntrackMax, conntrackBuckets)
	ns := newNamespace(t, "full")
	limit, _ := strconv.Atoi(sysctlNow(t, conntrackMax))
	expectNone(t, "conntrack-table-full", ns)
	fill(t, ns, int(capacity.CloseToFull*float64(limit))+1000)
	_, findings := examine(t, ns)
	if f := onlyFinding(t, findings, "conntrack-table-full"); f.Severity != Warning {
		t.Errorf("close to full is %s", f.Severity)
	}
	fill(t, ns, int(capacity.Full*float64(limit))+1000)
	_, findings = examine(t, ns)
	f := onlyFinding(t, findings, "conntrack-table-full")
	if f.Severity != Critical || f.Numbers["max"] != float64(limit) || f.Numbers["entries"] < capacity.Full*float64(limit) {
		t.Errorf("%s, %v", f.Severity, f.Numbers)
	}
	applyFixes(t, f)
	expectNone(t, "conntrack-table-full", ns)
	// Another program may have raised it further meanwhile.
	more := strconv.Itoa(4 * limit)
	shell(t, "sysctl -w "+conntrackMax+"="+more)
	if done := applyFixes(t, f); !strings.Contains(done[0].Note, "left alone: it is "+more) || sysctlNow(t, conntrackMax) != more {
		t.Errorf("a larger setting was changed: %+v, now %s", done, sysctlNow(t, conntrackMax))
	}
}

func TestATableThatEvictsIsFoundByItsCounters(t *testing.T) {
	n := &Node{Sampled: 1e9, Namespaces: []Namespace{{Report: conntrack.Report{Entries: 10, Limits: conntrack.Limits{Max: 1000}},
		Grown: conntrack.Counters{EarlyDrop: 3}}}}
	if got := (conntrackTableFull{}).Find(n); len(got) != 1 || got[0].Severity != Warning {
		t.Errorf("%+v", got)
	}
	n.Namespaces[0].Entries, n.Namespaces[0].Grown = 850, conntrack.Counters{Drop: 5, InsertFailed: 1}
	if got := (conntrackTableFull{}).Find(n); len(got) != 1 || got[0].Severity != Critical {
		t.Errorf("%+v", got)
	}
	n = &Node{Up: 2 * recent, Log: tableFull(map[uint64]conntrack.LogCount{0: {Lines: 3, Last: 2*recent - 60e9}})}
	if got := (conntrackTableFull{}).Find(n); len(got) != 1 || got[0].ID != "conntrack-table-was-full" ||
		!strings.Contains(got[0].Evidence[0], "1m0s ago") {
		t.Errorf("%+v", got)
	}
	n.Up *= 3
	if got := (conntrackTableFull{}).Find(n); len(got) != 0 {
		t.Errorf("long ago: %+v", got)
	}
}

// tableFull is a log with lines about a full table, by network namespace.
func tableFull(by map[uint64]conntrack.LogCount) map[conntrack.LogKind]conntrack.LogCount {
	return map[conntrack.LogKind]conntrack.LogCount{conntrack.TableFull: {ByNetns: by}}
}

// Linux 6.17 names the namespace: the table of a pod, or of the lab, is not the node's. Others'
// lines without a name are of a namespace that has dropped packets.
func TestAFullTableIsThatOfItsNamespace(t *testing.T) {
	was := conntrack.LogCount{Lines: 3, Last: recent - 60e9}
	ns := func(inode, drops uint64, name ...string) Namespace {
		return Namespace{Report: conntrack.Report{Namespace: conntrack.Namespace{Inode: inode, Own: name == nil, Names: name},
			Limits: conntrack.Limits{Max: 1000}, Counters: conntrack.Counters{Drop: drops}}}
	}
	for name, row := range map[string]struct {
		by   map[uint64]conntrack.LogCount
		list []Namespace
		want []string
	}{
		"named, of a namespace that is not examined": {map[uint64]conntrack.LogCount{3: was}, []Namespace{ns(1, 1), ns(2, 1, "a")}, nil},
		"named":                 {map[uint64]conntrack.LogCount{2: was}, []Namespace{ns(1, 0), ns(2, 1, "a")}, []string{"a"}},
		"the examined one":      {map[uint64]conntrack.LogCount{0: was}, []Namespace{ns(2, 1, "a")}, []string{"a"}},
		"another one dropped":   {map[uint64]conntrack.LogCount{0: was}, []Namespace{ns(1, 0), ns(2, 1, "a")}, []string{"a"}},
		"the node's own":        {map[uint64]conntrack.LogCount{0: was}, []Namespace{ns(1, 1), ns(2, 0, "a")}, []string{"(here)"}},
		"two have dropped":      {map[uint64]conntrack.LogCount{0: was}, []Namespace{ns(1, 1), ns(2, 1, "a")}, []string{""}},
		"one named, one is not": {map[uint64]conntrack.LogCount{0: was, 2: was}, []Namespace{ns(1, 1), ns(2, 0, "a")}, []string{"a", "(here)"}},
	} {
		var got []string
		for _, f := range (conntrackTableFull{}).Find(&Node{Up: recent, Namespaces: row.list, Log: tableFull(row.by)}) {
			got = append(got, f.Namespace)
		}
		if !slices.Equal(got, row.want) {
			t.Errorf("%s: findings of %q, want %q", name, got, row.want)
		}
	}
}

// The log does not tell the namespace. After a demo, the full table was that of a node
// that the lab has removed.
func TestAFullTableOfADeletedNamespaceIsNoFinding(t *testing.T) {
	node := func(ns Namespace, problems ...Problem) *Node {
		was := conntrack.LogCount{ByNetns: map[uint64]conntrack.LogCount{0: {Lines: 3, Last: recent - 60e9}}}
		return &Node{Up: recent, Namespaces: []Namespace{ns}, Problems: problems,
			Log: map[conntrack.LogKind]conntrack.LogCount{conntrack.TableFull: was, conntrack.ExpectTableFull: was}}
	}
	good := Namespace{Rules: &ruleset.Ruleset{}, AllRulesRead: true,
		Report: conntrack.Report{Limits: conntrack.Limits{Max: 1000, ExpectMax: 10}}}
	dropped, helped, unread := good, good, good
	dropped.Counters = conntrack.Counters{Drop: 1}
	helped.Rules = &ruleset.Ruleset{Rules: []*ruleset.Rule{{Command: "iptables-nft",
		Text: "-A PREROUTING -p udp -m udp --dport 69 -j CT --helper tftp"}}}
	unread.Limits, unread.AllRulesRead = conntrack.Limits{}, false
	for name, row := range map[string]struct {
		n                   *Node
		table, expectations int
	}{
		"nothing dropped":       {node(good), 0, 0},
		"packets dropped":       {node(dropped), 1, 0},
		"a helper assigned":     {node(helped), 0, 1},
		"nothing read":          {node(unread), 1, 1},
		"a namespace not read":  {node(good, Problem{What: "x", Namespaces: []string{"other"}}), 1, 1},
		"another thing unknown": {node(good, Problem{What: "x", Namespaces: []string{good.Namespace.String()}}), 0, 0},
	} {
		if got := len(conntrackTableFull{}.Find(row.n)); got != row.table {
			t.Errorf("%s: %d findings about the table, want %d", name, got, row.table)
		}
		if got := len(expectationTableFull{}.Find(row.n)); got != row.expectations {
			t.Errorf("%s: %d findings about expectations, want %d", name, got, row.expectations)
		}
	}
}

func TestAnExpectationTableThatIsFullIsFoundAndItsLimitRaised(t *testing.T) {
	restore(t, expectMax)
	ns := newNamespace(t, "expect")
	inside(t, ns, `nft 'add table ip t; add ct helper ip t tftp { type "tftp" protocol udp; }; add chain ip t c { type filter hook output priority 0; }; add rule ip t c udp dport 69 ct helper set "tftp"'`)
	limit, _ := strconv.Atoi(sysctlNow(t, expectMax))
	netnstest.Within(t, ns.Names[0], func() {
		for i := range int(capacity.Full*float64(limit)) + 2 {
			fd := socket(t, unix.SOCK_DGRAM)
			if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 1024 + i%60000, Addr: [4]byte{127, 0, 0, byte(1 + i/60000)}}); err != nil {
				t.Fatal(err)
			}
			_ = unix.Sendto(fd, []byte("\x00\x01boot\x00octet\x00"), 0, &unix.SockaddrInet4{Port: 69, Addr: [4]byte{127, 0, 0, 1}})
			unix.Close(fd)
		}
	})
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, "expectation-table-full")
	if f.Severity != Critical || !strings.Contains(f.Evidence[0], "of tftp") {
		t.Errorf("%+v", f)
	}
	applyFixes(t, f)
	expectNone(t, "expectation-table-full", ns)
}

func TestFewBucketsAreFoundAndRaised(t *testing.T) {
	restore(t, conntrackMax, conntrackBuckets)
	expectNone(t, "conntrack-buckets-few", conntrack.OwnNamespace())
	buckets, _ := strconv.Atoi(sysctlNow(t, conntrackBuckets))
	shell(t, fmt.Sprintf("sysctl -w %s=%d", conntrackMax, perBucket*buckets+1))
	_, findings := examine(t, conntrack.OwnNamespace())
	f := onlyFinding(t, findings, "conntrack-buckets-few")
	applyFixes(t, f)
	expectNone(t, "conntrack-buckets-few", conntrack.OwnNamespace())
	n := &Node{Namespaces: []Namespace{{Grown: conntrack.Counters{ChainTooLong: 2, InsertFailed: 2},
		Report: conntrack.Report{Counters: conntrack.Counters{ChainTooLong: 2, InsertFailed: 2}}}}}
	if got := (conntrackBucketsFew{}).Find(n); len(got) != 1 || got[0].Severity != Warning {
		t.Errorf("chains too long: %+v", got)
	}
	if got := (insertFailed{}).Find(n); len(got) != 0 {
		t.Errorf("chains too long are no race: %+v", got)
	}
}

func TestMasqueradeRulesWithFixedPortsAreFoundWithTheirOwner(t *testing.T) {
	for i, row := range []struct{ owner, rules, where string }{
		{"Docker", `iptables-legacy -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE`, "iptables-legacy nat POSTROUTING 1"},
		{"flannel", `iptables-nft -t nat -N FLANNEL-POSTRTG; iptables-nft -t nat -A FLANNEL-POSTRTG -s 10.244.0.0/16 -m comment --comment "flanneld masq" -j RETURN
			iptables-nft -t nat -A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE`, "iptables-nft nat FLANNEL-POSTRTG 2"},
		{"flannel", `nft 'add table ip flannel-ipv4; add chain ip flannel-ipv4 postrtg { type nat hook postrouting priority 100; }; add rule ip flannel-ipv4 postrtg ip saddr 10.244.0.0/16 ip daddr != 224.0.0.0/4 masquerade comment "it'"'"'s flannel"'`, "nft ip flannel-ipv4 postrtg handle 2"},
		{"kube-proxy", `ip6tables-legacy -t nat -N KUBE-POSTROUTING; ip6tables-legacy -t nat -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE`, "ip6tables-legacy nat KUBE-POSTROUTING 1"},
		{"kube-proxy", `nft 'add table ip kube-proxy; add chain ip kube-proxy masquerading { type nat hook postrouting priority 100; }; add rule ip kube-proxy masquerading meta mark & 0x4000 != 0 masquerade random'`, "nft ip kube-proxy masquerading handle 2"},
		{"Docker", `nft 'add table ip docker-bridges; add chain ip docker-bridges nat { type nat hook postrouting priority 100; }; add rule ip docker-bridges nat oifname != "docker0" ip saddr 172.17.0.0/16 counter masquerade'`, "nft ip docker-bridges nat handle 2"},
		{"an unknown owner", `iptables-nft -t nat -A POSTROUTING -s 10.0.0.0/8 -o eth0 -j SNAT --to-source 192.0.2.1`,
			"iptables-nft nat POSTROUTING 1"},
	} {
		ns := newNamespace(t, fmt.Sprintf("masq%d", i))
		inside(t, ns, row.rules)
		_, findings := examine(t, ns)
		f := onlyFinding(t, findings, "masquerade-not-random")
		if !strings.HasSuffix(f.Title, "by rules of "+row.owner) || !strings.HasPrefix(f.Evidence[1], row.where+": ") || len(f.Commands) != 1 {
			t.Errorf("%s: %+v", row.rules, f)
		}
		shell(t, f.Commands[0])
		expectNone(t, "masquerade-not-random", ns)
	}
}

func TestTimeoutsLongerThanFlowsLiveAreFound(t *testing.T) {
	ns := newNamespace(t, "silent")
	limit, _ := strconv.Atoi(sysctlNow(t, conntrackMax))
	many := int(someSilent*float64(limit)) + 100
	netnstest.Within(t, ns.Names[0], func() {
		for i := range many {
			plant(t, fmt.Sprintf("192.0.2.1:%d", 1+i%60000), fmt.Sprintf("198.51.100.%d:53", 1+i/60000), 18) // silent for 12 of 30 s
		}
	})
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, "timeouts-long")
	if f.Severity != Info || f.Numbers["udp_timeout_seconds"] != 30 || !strings.Contains(f.Settings, "value: \"10\"") {
		t.Errorf("%+v", f)
	}
	if len(f.fixes) > 0 {
		t.Error("--fix would shorten a timeout")
	}
	shell(t, strings.Join(f.Commands, "\n"))
	expectNone(t, "timeouts-long", ns)
}

func TestTimeoutsOfPodsThatAreNotTheNodesAreFound(t *testing.T) {
	node, one, two := conntrack.OwnNamespace(), newNamespace(t, "pod1"), newNamespace(t, "pod2")
	for _, ns := range []conntrack.Namespace{one, two} {
		inside(t, ns, "sysctl -w net.netfilter.nf_conntrack_udp_timeout=17 net.netfilter.nf_conntrack_tcp_timeout_time_wait=99")
		send(t, ns, "127.0.0.1:9") // in use
	}
	idle := newNamespace(t, "idle")
	inside(t, idle, "sysctl -w net.netfilter.nf_conntrack_udp_timeout=19")
	_, findings := examine(t, node, one, two, idle)
	f := onlyFinding(t, findings, "timeouts-differ")
	if f.Numbers["namespaces"] != 2 || len(f.Evidence) != 2 ||
		!strings.Contains(f.Evidence[1], "udp: 30s here, 17s in "+one.String()+", "+two.String()) {
		t.Errorf("%+v", f)
	}
	if !strings.Contains(f.Settings, "allowedUnsafeSysctls") ||
		!strings.Contains(f.Settings, "- name: net.netfilter.nf_conntrack_tcp_timeout_time_wait\n      value: \"120\"") {
		t.Errorf("settings:\n%s", f.Settings)
	}
	shell(t, strings.Join(f.Commands, "\n"))
	expectNone(t, "timeouts-differ", node, one, two, idle)
}

// The tables of the dataplane nftables, as its own tests have them, assign helpers by
// sets, and keep the source of expected connections. There is nothing to fix.
func TestSpillwaysOwnHelpersAreInOrder(t *testing.T) {
	for _, row := range []struct {
		name, protocol, set string
		port                int
	}{{"tftp", "udp", "nodeports4-tftp", 69}, {"ftp", "tcp", "nodeports6-ftp", 21}} {
		ns := newNamespace(t, "own-"+row.name)
		for _, file := range []string{"empty", row.name} {
			text, err := os.ReadFile(filepath.Join("../../dataplane/nftables/testdata", file+".nft"))
			if err != nil {
				t.Fatal(err)
			}
			// nft prints these lines, but does not accept them.
			text = regexp.MustCompile(`(?m)^.*(ct original proto-dst|@clients6).*$`).ReplaceAll(text, nil)
			text = bytes.ReplaceAll(text, []byte("1069"), []byte("69"))
			path := filepath.Join(t.TempDir(), file)
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
			inside(t, ns, "nft -f "+path)
		}
		n, findings := examine(t, ns)
		if len(n.Namespaces[0].Rules.Frontends(row.protocol, row.port)) == 0 {
			t.Errorf("%s: nothing is seen that needs the helper", row.name)
		}
		for _, id := range []string{"helper-missing", "masquerade-not-random"} {
			for _, f := range withID(findings, id) {
				t.Errorf("%s: %+v", row.name, f)
			}
		}
		// A port outside the sets has no helper.
		inside(t, ns, "nft flush set inet spillway "+row.set)
		_, findings = examine(t, ns)
		onlyFinding(t, findings, "helper-missing")
	}
}

func TestServicesThatNeedAHelperAreFound(t *testing.T) {
	const proxy = ` -t nat -N KUBE-SERVICES; IPT -t nat -A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES; IPT -t nat -A OUTPUT -j KUBE-SERVICES
IPT -t nat -N KUBE-NODEPORTS; IPT -t nat -N KUBE-SVC-A; IPT -t nat -N KUBE-SEP-A; IPT -t nat -N KUBE-MARK-MASQ
IPT -t nat -A KUBE-SERVICES -d 10.96.0.5/32 -p udp -m comment --comment "tftp/tftp:tftp cluster IP" -m udp --dport 6969 -j KUBE-SVC-A
IPT -t nat -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
IPT -t nat -A KUBE-NODEPORTS -p udp -m udp --dport 30069 -j KUBE-SVC-A
IPT -t nat -A KUBE-SVC-A -j KUBE-SEP-A
IPT -t nat -A KUBE-SEP-A -s 10.244.0.2/32 -j KUBE-MARK-MASQ
IPT -t nat -A KUBE-SEP-A -p udp -m udp -j DNAT --to-destination 10.244.0.2:69`
	const nft = `nft -f - <<'EOF'
table ip kube-proxy {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.5 . udp . 69 comment "tftp/tftp" : goto service-x/tftp/udp/tftp, 10.96.0.5 . tcp . 80 : goto service-x/tftp/udp/http }
	}
	map service-nodeports {
		type inet_proto . inet_service : verdict
		elements = { udp . 30069 : goto external-x/tftp/udp/tftp }
	}
	chain endpoint-a { meta l4proto udp dnat to 10.244.0.2:69; }
	chain service-x/tftp/udp/http { meta l4proto tcp dnat to 10.244.0.2:80; }
	chain service-x/tftp/udp/tftp { numgen random mod 1 vmap { 0 : goto endpoint-a }; }
	chain external-x/tftp/udp/tftp { goto service-x/tftp/udp/tftp; }
	chain services { type nat hook output priority -100; ip daddr . meta l4proto . th dport vmap @service-ips; fib daddr type local meta l4proto . th dport vmap @service-nodeports; }
}
EOF`
	for i, row := range []struct {
		name, rules, where string
		ports              []int
	}{
		// A rule for another port assigns no helper to these.
		{"iptables-nft", strings.ReplaceAll("IPT"+proxy, "IPT", "iptables-nft") +
			"\niptables-nft -t raw -A PREROUTING -p udp --dport 69 -j CT --helper tftp", "10.96.0.5:6969", []int{6969, 30069}},
		{"iptables-legacy", strings.ReplaceAll("IPT"+proxy, "IPT", "iptables-legacy"), "10.96.0.5:6969", []int{6969, 30069}},
		{"nft", nft, "10.96.0.5:69", []int{69, 30069}},
		{"iptables, port 69 to another", `iptables-nft -t nat -A OUTPUT -d 10.96.0.5/32 -p udp -m udp --dport 69 -j DNAT --to-destination 10.244.0.2:1069`, "10.96.0.5:69", []int{69}},
		{"ftp", `iptables-nft -t nat -A OUTPUT -d 10.96.0.5/32 -p tcp --dport 2121 -j DNAT --to-destination 10.244.0.2:21`, "", []int{2121}},
	} {
		ns := newNamespace(t, fmt.Sprintf("helper%d", i))
		inside(t, ns, outward+row.rules)
		_, findings := examine(t, ns)
		f := onlyFinding(t, findings, "helper-missing")
		for _, port := range row.ports {
			if !strings.Contains(strings.Join(f.Evidence, "\n"), fmt.Sprintf("port %d to", port)) {
				t.Errorf("%s: port %d is not in %q", row.name, port, f.Evidence)
			}
		}
		if int(f.Numbers["frontends"]) != len(row.ports) {
			t.Errorf("%s: %v", row.name, f.Evidence)
		}
		shell(t, strings.Join(f.Commands, "\n"))
		expectNone(t, "helper-missing", ns)
		if row.where != "" {
			send(t, ns, row.where)
			if n, _ := examine(t, ns); n.Namespaces[0].Expectations["tftp"] != 1 {
				t.Errorf("%s: a request makes no expectation: %v", row.name, n.Namespaces[0].Expectations)
			}
		}
	}
}

func TestBridgesBesideTheRulesAreFound(t *testing.T) {
	ns := newNamespace(t, "bridge")
	inside(t, ns, `ip link add cni0 type bridge; for i in 1 2; do ip link add v$i type veth peer name p$i; ip link set v$i master cni0; done
sysctl -w net.bridge.bridge-nf-call-iptables=1`)
	send(t, ns, "127.0.0.1:9")
	_, findings := examine(t, ns)
	on := onlyFinding(t, findings, "bridge-netfilter-on")
	shell(t, strings.Join(on.Commands, "\n"))
	expectNone(t, "bridge-netfilter-on", ns)
	inside(t, ns, "iptables-nft -t nat -A OUTPUT -d 10.96.0.5/32 -p udp --dport 53 -j DNAT --to-destination 10.244.0.2:53")
	_, findings = examine(t, ns)
	off := onlyFinding(t, findings, "bridge-netfilter-off")
	if !strings.Contains(off.Evidence[0], "cni0 (2 ports)") || off.Severity != Warning {
		t.Errorf("%+v", off)
	}
	shell(t, strings.Join(off.Commands, "\n"))
	expectNone(t, "bridge-netfilter-off", ns)
	without := onOff(nil)
	if !strings.Contains(without, "not loaded") {
		t.Error(without)
	}
}

func TestRulesInBothVariantsAreFound(t *testing.T) {
	ns := newNamespace(t, "both")
	inside(t, ns, `iptables-legacy -t nat -N DOCKER; iptables-legacy -t nat -A OUTPUT -j DOCKER
iptables-nft -N KUBE-FORWARD; iptables-nft -A KUBE-FORWARD -j ACCEPT; iptables-nft -A FORWARD -j KUBE-FORWARD; iptables-nft -A FORWARD -s 10.0.0.0/8 -j ACCEPT
ip6tables-nft -A FORWARD -j ACCEPT`)
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, "iptables-both-variants")
	if !strings.Contains(f.Evidence[0], "iptables-nft has 3 rules (kube-proxy 2, unknown 1)") ||
		!strings.Contains(f.Evidence[1], "iptables-legacy has 1 rule (Docker 1)") {
		t.Errorf("%q", f.Evidence)
	}
	f.Commands = slices.Clone(f.Commands)
	f.Commands[0] = strings.ReplaceAll(f.Commands[0], "/root/", t.TempDir()+"/")
	shell(t, strings.Join(f.Commands, "\n"))
	expectNone(t, "iptables-both-variants", ns)
}

func TestManyRulesBeforeTheFirstPacketAreFound(t *testing.T) {
	ns := newNamespace(t, "rules")
	var b strings.Builder
	b.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n:ELSEWHERE - [0:0]\n-A PREROUTING -m comment --comment \"kubernetes service portals\" " +
		"-j KUBE-SERVICES\n-A OUTPUT -d 10.0.0.1/32 -j ELSEWHERE\n")
	for i := range manyRules {
		fmt.Fprintf(&b, "-A KUBE-SERVICES -d 10.96.%d.%d/32 -p tcp -m tcp --dport 80 -j RETURN\n-A ELSEWHERE -s 10.0.0.1/32 -j RETURN\n", i/256,
			i%256)
	}
	inside(t, ns, "iptables-nft-restore -n <<'EOF'\n"+b.String()+"COMMIT\nEOF")
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, "rules-many")
	if f.Numbers["rules"] != manyRules+1 || !strings.Contains(f.Title, "nat PREROUTING") {
		t.Errorf("%+v", f)
	}
	inside(t, ns, "iptables-nft -t nat -F KUBE-SERVICES") // as kube-proxy --cleanup does
	expectNone(t, "rules-many", ns)
}

func TestStaleUDPEntriesAreFoundAndDeleted(t *testing.T) {
	ns := newNamespace(t, "stale")
	inside(t, ns, outward+`
nft -f - <<'EOF'
table ip kube-proxy {
	chain endpoint { udp dport { 53, 54 } dnat to 10.244.0.2; udp dport 55 dnat to 10.244.0.8-10.244.0.9; }
	chain output { type nat hook output priority -100; ip daddr 10.96.0.10 goto endpoint; }
	chain firewall { ip daddr 10.244.0.2 accept; }
}
EOF`)
	for _, port := range []string{"53", "54", "55"} {
		send(t, ns, "10.96.0.10:"+port)
	}
	expectNone(t, "stale-udp-entries", ns)
	// The endpoint moves.
	inside(t, ns, "nft 'flush chain ip kube-proxy endpoint; add rule ip kube-proxy endpoint udp dport { 53, 54 } dnat to 10.244.0.3; add "+
		"rule ip kube-proxy endpoint udp dport 55 dnat to 10.244.0.8-10.244.0.9'")
	send(t, ns, "10.96.0.10:53")
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, "stale-udp-entries")
	if f.Numbers["endpoints"] != 2 || f.Numbers["entries"] != 2 ||
		!strings.Contains(f.Evidence[0], "10.244.0.2:53: 1 entry, no rule translates to it") {
		t.Errorf("%+v", f)
	}
	// The printed command does the same as --fix.
	shell(t, strings.Join(f.Commands, "\n"))
	expectNone(t, "stale-udp-entries", ns)
	// A node disappears, and its route with it, while rules still have the endpoint.
	inside(t, ns, "ip route add unreachable 10.244.0.0/16")
	_, findings = examine(t, ns)
	f = onlyFinding(t, findings, "stale-udp-entries")
	if !strings.Contains(f.Evidence[0], "no route") || f.Numbers["entries"] != 2 {
		t.Errorf("%+v", f)
	}
	if done := applyFixes(t, f); done[0].Note != "2 deleted" {
		t.Errorf("%+v", done)
	}
	expectNone(t, "stale-udp-entries", ns)
}

// TestEntriesThatServicesContradictAreFound: with eBPF no rule shows the endpoints, but an agent
// knows them.
func TestEntriesThatServicesContradictAreFound(t *testing.T) {
	ns := newNamespace(t, "removed")
	inside(t, ns, outward+`
nft -f - <<'EOF'
table ip nat {
	chain output { type nat hook output priority -100; ip daddr 10.96.0.10 dnat to 10.244.0.2; ip daddr 10.96.0.11 dnat to 10.244.0.2; }
}
EOF`)
	for _, to := range []string{"10.96.0.10:53", "10.96.0.10:54", "10.96.0.11:55"} {
		send(t, ns, to)
	}
	inside(t, ns, "nft flush ruleset")
	expectNone(t, "stale-udp-entries", ns)
	ns.Own = true
	asked := 0
	uses := func(_ context.Context, addrs []netip.AddrPort) ([]AddressUse, error) {
		uses := make([]AddressUse, len(addrs))
		for i, a := range addrs {
			switch a.String() {
			case "10.96.0.10:53", "10.96.0.10:54":
				uses[i].Service = "shop/dns:udp"
			case "10.244.0.2:54":
				uses[i].EndpointOf = []string{"shop/dns:udp"}
			}
		}
		asked += len(addrs)
		return uses, nil
	}
	n, err := Load(t.Context(), Config{Uses: uses,
		Namespaces: func() ([]conntrack.Namespace, error) { return []conntrack.Namespace{ns}, nil }})
	if err != nil || asked != 6 {
		t.Fatalf("%v, %d addresses were asked for", err, asked)
	}
	f := onlyFinding(t, Examine(n), "stale-udp-entries")
	if len(f.Evidence) != 1 || !strings.Contains(f.Evidence[0], "10.244.0.2:53: 1 entry, Service shop/dns:udp does not have it") {
		t.Errorf("%+v", f)
	}
	if done := applyFixes(t, f); done[0].Note != "1 deleted" {
		t.Errorf("%+v", done)
	}
}

func TestInvalidPacketsWhereRulesTranslateAreFound(t *testing.T) {
	ns := newNamespace(t, "invalid")
	inside(t, ns, `nft 'add table ip kube-proxy; add chain ip kube-proxy f { type filter hook prerouting priority 0; }; add chain ip kube-proxy n { type nat hook prerouting priority -100; }; add rule ip kube-proxy n udp dport 53 dnat to 10.244.0.2'`)
	expectNone(t, "tcp-not-liberal", ns)
	netnstest.Within(t, ns.Names[0], func() { sendNothing(t) })
	_, findings := examine(t, ns)
	if f := onlyFinding(t, findings, "tcp-not-liberal"); f.Severity != Info {
		t.Errorf("%+v", f)
	}
	inside(t, ns, "nft add rule ip kube-proxy f ct state invalid drop")
	_, findings = examine(t, ns)
	f := onlyFinding(t, findings, "tcp-not-liberal")
	if f.Severity != Warning || !strings.Contains(f.Evidence[2], "ct state invalid drop") {
		t.Errorf("%+v", f)
	}
	applyFixes(t, f)
	expectNone(t, "tcp-not-liberal", ns)
}

func TestChecksumsThatAVXLANDeviceLeavesAreFound(t *testing.T) {
	ns := newNamespace(t, "vxlan")
	inside(t, ns, "ip link add flannel.1 type vxlan id 1 dstport 8472 dev lo local 127.0.0.1 nolearning; ip link set flannel.1 up")
	expectNone(t, "vxlan-checksum-offload", ns)
	netnstest.Within(t, ns.Names[0], func() {
		server := socket(t, unix.SOCK_DGRAM)
		defer unix.Close(server)
		if err := unix.Bind(server, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		datagram := []byte{0, 9, 0, 9, 0, 12, 0xba, 0xad, 1, 2, 3, 4}
		_ = unix.Sendto(fd, datagram, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	})
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, "vxlan-checksum-offload")
	if f.Numbers["udp_checksum_errors"] != 1 {
		t.Errorf("%+v", f)
	}
	shell(t, strings.Join(f.Commands, "\n"))
	expectNone(t, "vxlan-checksum-offload", ns)
}

func TestEveryNameOfATimeoutIsASysctl(t *testing.T) {
	limits, err := conntrack.ReadLimits()
	if err != nil {
		t.Fatal(err)
	}
	for name := range maps.Keys(limits.Timeouts) {
		sysctlNow(t, conntrack.TimeoutSysctl(name))
	}
	for name := range pauses {
		if limits.Timeouts[name] == 0 {
			t.Errorf("the kernel has no timeout %s", name)
		}
	}
}

// TestStaleIsAskedOfWhatRulesTranslate: conntrack translates an expected connection like
// its master, a TFTP transfer to the client itself. No rule mentions that.
func TestStaleIsAskedOfWhatRulesTranslate(t *testing.T) {
	for status, want := range map[conntrack.Status]bool{
		conntrack.DstNAT: true, conntrack.DstNAT | conntrack.Assured: true, 0: false,
		conntrack.DstNAT | conntrack.Expected: false, conntrack.DstNAT | conntrack.Dying: false,
	} {
		e := conntrack.Entry{Protocol: unix.IPPROTO_UDP, Status: status, Reply: conntrack.Tuple{Src: netip.MustParseAddrPort("10.0.0.1:1")}}
		if translatedUDP(&e) != want {
			t.Errorf("status %#x is covered: %v", status, !want)
		}
	}
}
