package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/topology"
)

// cachePort is memcached's.
const cachePort = 11211

// policyPods are the pods of the cluster as manifests: which role they have.
type policyPods map[string]string

func (e *env) writePods(t *testing.T, roles policyPods) {
	t.Helper()
	e.writeAll(t, "pods.yaml", e.podsYAML(roles))
}

func (e *env) podsYAML(roles policyPods) string {
	var b strings.Builder
	for short, role := range roles {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: %s, labels: {role: %s}}\nspec: {nodeName: %s}\n",
			short, role+"s", role, e.NodeName(short))
		fmt.Fprintf(&b, "status: {podIP: %s, podIPs: [{ip: %s}, {ip: %s}]}\n", e.Addr(short, false), e.Addr(short, false), e.Addr(short, true))
	}
	for _, ns := range []string{"caches", "clients", "others"} {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {team: %s}}\n", ns, ns)
	}
	return b.String()
}

// writeAll writes a manifest for every node and waits until all have it applied: a sync
// has ended since, and a Service that was written later is served. On a busy machine the
// first sync to end may be one from before.
func (e *env) writeAll(t *testing.T, name, text string) {
	t.Helper()
	for _, node := range e.Nodes() {
		before, err := e.Agent(node).LastSync(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Agent(node).Write(name, []byte(text)); err != nil {
			t.Fatal(err)
		}
		await.NoError(t, func() error {
			now, err := e.Agent(node).LastSync(t.Context())
			if err == nil && now.After(before) {
				return nil
			}
			return fmt.Errorf("%s has not applied %s: %v\n%s", node, name, err, e.Agent(node).Tail())
		})
	}
	if e.canary == nil {
		e.canary = e.NewFile()
	}
	e.canary.MustWrite(t)
	e.canary.MustWait(t)
}

// policyYAML is a policy for caches; fields are added to its spec.
func policyYAML(name, fields, peers string) string {
	return fmt.Sprintf(`
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: %s}
spec:
  podSelector: {matchLabels: {role: cache}}
%s  ingress:
  - ports: [{port: %d}]
    from: [%s]
`, name, fields, cachePort, peers)
}

const clientPods = "{namespaceSelector: {matchLabels: {team: clients}}, podSelector: {matchLabels: {role: client}}}"

// startMemcached runs the real one on a host.
func (e *env) startMemcached(t *testing.T, short string) {
	t.Helper()
	h := e.MustHost(t, short)
	cmd := h.Command(context.Background(), "memcached", "-u", "root", "-m", "16", "-c", "4096", "-p", fmt.Sprint(cachePort))
	if err := cmd.Start(); err != nil {
		t.Fatalf("start memcached: %v", err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	await.NoError(t, func() error { return e.get(t, short, e.cache(short, false), 0) })
}

func (e *env) cache(short string, v6 bool) netip.AddrPort {
	return netip.AddrPortFrom(e.Addr(short, v6), cachePort)
}

// get asks a cache once, from a port of one's choice or any.
func (e *env) get(t *testing.T, from string, to netip.AddrPort, sourcePort int) error {
	t.Helper()
	return getFrom(e.dial(t, from, to, sourcePort))
}

// getInVain is get for a question that a policy denies.
func (e *env) getInVain(t *testing.T, from string, to netip.AddrPort, sourcePort int) error {
	t.Helper()
	return getFrom(e.dialFor(t, from, to, sourcePort, 700*time.Millisecond))
}

func getFrom(conn net.Conn, err error) error {
	if err != nil {
		return err
	}
	defer conn.Close()
	return askCache(conn)
}

// dial opens a connection that no policy denies, on a busy machine too.
func (e *env) dial(t *testing.T, from string, to netip.AddrPort, sourcePort int) (conn net.Conn, err error) {
	t.Helper()
	return e.dialFor(t, from, to, sourcePort, patienceMS*time.Millisecond)
}

func (e *env) dialFor(t *testing.T, from string, to netip.AddrPort, sourcePort int, patience time.Duration) (conn net.Conn, err error) {
	t.Helper()
	err = e.MustHost(t, from).Do(func() error {
		d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{Port: sourcePort}, Control: reuse}
		conn, err = d.DialContext(t.Context(), "tcp", to.String())
		return err
	})
	return conn, err
}

func reuse(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) })
}

func askCache(conn net.Conn) error {
	_ = conn.SetDeadline(time.Now().Add(patienceMS * time.Millisecond))
	if _, err := conn.Write([]byte("get nothing\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && line != "END\r\n" {
		err = fmt.Errorf("memcached answers %q", line)
	}
	return err
}

// entries counts what conntrack of a node remembers of a port.
func (e *env) entries(t *testing.T, node string, port int) (n int) {
	t.Helper()
	for _, family := range []string{"ipv4", "ipv6"} {
		out := run(t, e.MustHost(t, node), "conntrack", "-L", "-f", family, "-p", "tcp")
		for line := range strings.Lines(out) {
			if strings.Contains(line, fmt.Sprintf("port=%d ", port)) {
				n++
			}
		}
	}
	return n
}

// entriesTo counts what conntrack of a node remembers of connections to an address.
func (e *env) entriesTo(t *testing.T, node string, to netip.AddrPort) (n int) {
	t.Helper()
	for line := range strings.Lines(run(t, e.MustHost(t, node), "conntrack", "-L", "-p", "tcp", "-d", to.Addr().String(), "--dport",
		fmt.Sprint(to.Port()))) {
		if strings.Contains(line, "dst=") {
			n++
		}
	}
	return n
}

func (e *env) forgetEntries(t *testing.T) {
	t.Helper()
	for _, node := range e.Nodes() {
		run(t, e.MustHost(t, node), "conntrack", "-F")
	}
}

// caching is a client that asks a cache and what is to become of it.
type caching struct {
	from    string
	v6      bool
	denied  bool
	tracked bool // node a has an entry of it
}

func (e *env) expectCaching(t *testing.T, when string, cases ...caching) {
	t.Helper()
	for _, c := range cases {
		what := fmt.Sprintf("%s: %s asks (IPv6 %v)", when, c.from, c.v6)
		e.expectTracked(t, what, "a", cachePort, c.tracked, func() {
			get := e.get
			if c.denied {
				get = e.getInVain
			}
			if err := get(t, c.from, e.cache("a0", c.v6), 0); (err != nil) != c.denied {
				t.Errorf("%s: %v, want denied %v", what, err, c.denied)
			}
		})
	}
}

// expectTracked wants that a node has conntrack entries of a port after a question, or none. It asks
// again where it has others: a late packet of an earlier connection makes an entry, too.
func (e *env) expectTracked(t *testing.T, what, node string, port int, tracked bool, ask func()) {
	t.Helper()
	await.NoError(t, func() error {
		e.forgetEntries(t)
		ask()
		if n := e.entries(t, node, port); (n > 0) != tracked {
			return fmt.Errorf("%s: node %s has %d conntrack entries, want tracked %v", what, node, n, tracked)
		}
		return nil
	})
}

// TestDoNotTrackPolicies asks a real memcached in a pod, from pods of another node
// and from nodes, with each dataplane and each kind of policy.
func TestDoNotTrackPolicies(t *testing.T) {
	spec := topology.DefaultSpec("e2e-notrack")
	spec.Conntrack = true
	e := startSpec(t, spec)
	e.startMemcached(t, "a0")
	e.writePods(t, policyPods{"a0": "cache", "b0": "client", "b1": "other"})
	for _, mode := range []string{"nftables", "iptables", "ebpf"} {
		e.Mode = mode
		for _, node := range e.Nodes() {
			e.restart(t, node, syscall.SIGTERM)
		}
		e.waitReady(t)
		e.expectCaching(t, mode+", no policy", caching{from: "b0", tracked: true}, caching{from: "b0", v6: true, tracked: true},
			caching{from: "b1", tracked: true})

		e.writeAll(t, "policy.yaml", policyYAML("cache", "", clientPods))
		e.expectCaching(t, mode+", peers", caching{from: "b0"}, caching{from: "b0", v6: true},
			caching{from: "b1", tracked: true}, caching{from: "b", tracked: true})

		e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n", clientPods))
		e.expectCaching(t, mode+", deny", caching{from: "b0"}, caching{from: "b0", v6: true},
			caching{from: "b1", denied: true}, caching{from: "b1", v6: true, denied: true}, caching{from: "b", denied: true},
			caching{from: "a", tracked: true}, caching{from: "a", v6: true, tracked: true}) // as kubelet's probes

		if mode != "nftables" { // where the agent translates, and where it does not
			t.Run(mode+", a policy goes beside a masquerade", func(t *testing.T) { e.testPolicyGoesBesideMasquerade(t) })
		}
		t.Run(mode+", kinds", func(t *testing.T) { e.testKindsOfPolicy(t) })
		if mode == "iptables" {
			e.writeAll(t, "policy.yaml", "")
			continue
		}
		t.Run(mode+" with a Service", func(t *testing.T) { e.testPolicyAndService(t) })
		if mode == "ebpf" {
			t.Run("past netfilter", func(t *testing.T) { e.testPastNetfilter(t) })
		}
		if mode != "iptables" {
			t.Run(mode+", a hostPort", func(t *testing.T) { e.testHostPort(t) })
			t.Run(mode+", ports as sources", func(t *testing.T) { e.testPortsAsSources(t) })
			t.Run(mode+", under load", func(t *testing.T) { e.testPoliciesUnderLoad(t) })
			t.Run(mode+", another pod", func(t *testing.T) { e.testAnotherPod(t) })
		}
		e.writeAll(t, "policy.yaml", "")
		e.expectCaching(t, mode+", policy gone", caching{from: "b0", tracked: true}, caching{from: "b1", tracked: true})
	}
}

func (e *env) testKindsOfPolicy(t *testing.T) {
	e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n  track: true\n", clientPods))
	e.expectCaching(t, "track and deny", caching{from: "b0", tracked: true}, caching{from: "b1", denied: true})

	block := fmt.Sprintf("{ipBlock: {cidr: 10.0.0.0/8, except: [%s/32]}}", e.Addr("b1", false))
	e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n", block))
	e.expectCaching(t, "ranges", caching{from: "b0"}, caching{from: "b1", denied: true}, caching{from: "b0", v6: true, denied: true})
	if e.Mode == "ebpf" { // such packets never come to the table that counts
		e.expectMetric(t, "a", `spillway_ebpf_verdicts_total{verdict="passed_untracked"}`)
	} else {
		e.expectMetric(t, "a", `spillway_do_not_track_packets_total{policy="cache",verdict="untracked"}`)
	}
	e.expectMetric(t, "a", `spillway_do_not_track_packets_total{policy="cache",verdict="denied"}`)

	// The other side of the same traffic, for what leaves the node of the clients.
	e.writeAll(t, "policy.yaml", strings.NewReplacer("role: cache", "role: client", "ingress:", "egress:", "from:", "to:", "PEER", "cache").
		Replace(policyYAML("cache", "", "{podSelector: {matchLabels: {role: PEER}}}")))
	e.expectTracked(t, "egress", "b", cachePort, false, func() {
		if err := e.get(t, "b0", e.cache("a0", false), 0); err != nil {
			t.Error(err)
		}
	})
	if n := e.entries(t, "a", cachePort); n == 0 {
		t.Error("egress: the caches' node has no entry, and no policy for it")
	}

	node := strings.Replace(policyYAML("node", "  deny: others\n",
		fmt.Sprintf("{ipBlock: {cidr: %s/32}}, {ipBlock: {cidr: %s/128}}", e.Addr("b", false), e.Addr("b", true))),
		"podSelector: {matchLabels: {role: cache}}", "nodeSelector: {matchExpressions: [{key: topology.kubernetes.io/zone, operator: Exists}]}",
		1)
	e.writeAll(t, "policy.yaml", strings.Replace(node, fmt.Sprint(cachePort), "8080", 1))
	for _, v6 := range []bool{false, true} {
		to := netip.AddrPortFrom(e.Addr("a", v6), 8080)
		for from, allowed := range map[string]bool{"b": true, "client0": false, "a": true} { // itself too
			what := "a node's port, from " + from
			ask := func() {
				patience := 700 * time.Millisecond
				if allowed {
					patience = patienceMS * time.Millisecond
				}
				conn, err := e.dialFor(t, from, to, 0, patience)
				if err == nil {
					conn.Close()
				}
				if (err == nil) != allowed {
					t.Errorf("%s: %v, want allowed %v", what, err, allowed)
				}
			}
			if from == "a" { // its entry says nothing
				ask()
				continue
			}
			e.expectTracked(t, what, "a", 8080, false, ask)
		}
	}
}

// expectMetric wants a series of a node's agent that is more than 0.
func (e *env) expectMetric(t *testing.T, node, series string) {
	t.Helper()
	page, err := e.Agent(node).Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, value, there := strings.Cut(page, series+" ")
	if value, _, _ = strings.Cut(value, "\n"); !there || value == "0" {
		t.Errorf("%s is %q", series, value)
	}
}

// testPortsAsSources takes the ports of a policy as the source of connections of the
// cache's own: they pass for answers, to its peers alone.
func (e *env) testPortsAsSources(t *testing.T) {
	const free = 11299
	policy := strings.Replace(policyYAML("cache", "  deny: others\n", clientPods), "ports: [", fmt.Sprintf("ports: [{port: %d}, ", free), 1)
	e.writeAll(t, "policy.yaml", policy)
	for _, c := range []struct {
		from, to string
		source   int
		passes   bool
		tracked  bool
	}{
		{"a0", "b0", free, true, false}, // what symmetry costs
		{"a0", "b1", free, false, false},
		{"a0", "b1", 0, true, true},
		{"b1", "a0", free, true, true}, // it is the cache's port that counts
	} {
		to := netip.AddrPortFrom(e.Addr(c.to, false), 8080)
		e.forgetEntries(t)
		patience := 700 * time.Millisecond
		if c.passes {
			patience = patienceMS * time.Millisecond
		}
		conn, err := e.dialFor(t, c.from, to, c.source, patience)
		if err == nil {
			conn.Close()
		}
		if (err == nil) != c.passes {
			t.Errorf("%s:%d to %s: %v, want passes %v", c.from, c.source, to, err, c.passes)
		}
		if n := e.entriesTo(t, "a", to); (n > 0) != c.tracked {
			t.Errorf("%s:%d to %s: %d entries, want tracked %v", c.from, c.source, to, n, c.tracked)
		}
	}
	if err := e.getInVain(t, "b1", e.cache("a0", false), free); err == nil {
		t.Error("a stranger is let in by its source port")
	}
}

// testPoliciesUnderLoad has policies come and go while connections are open and
// new ones are made. None may notice.
func (e *env) testPoliciesUnderLoad(t *testing.T) {
	e.forgetEntries(t) // of non-peers
	stop := make(chan struct{})
	var asked, failed atomic.Int64
	var wg sync.WaitGroup
	load := func(once func() error) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				asked.Add(1)
				if err := once(); err != nil {
					failed.Add(1)
					t.Errorf("under load: %v", err)
					return
				}
			}
		})
	}
	end := sync.OnceFunc(func() { close(stop); wg.Wait() })
	defer end() // also if the test fails below: the load must not outlive it
	for _, v6 := range []bool{false, true} {
		conn, err := e.dial(t, "b0", e.cache("a0", v6), 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() }) // after the end of the load
		load(func() error { return askCache(conn) })
		// Less than a second, after which a lost SYN is sent again.
		load(func() error { return getFrom(e.dialFor(t, "b0", e.cache("a0", v6), 0, 950*time.Millisecond)) })
	}
	for range 5 {
		e.writeAll(t, "policy.yaml", "")
		e.writeAll(t, "policy.yaml", policyYAML("cache", "", clientPods))
		e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n", clientPods))
	}
	// Open connections were tracked for a while; conntrack would not see them end.
	await.True(t, "the end of conntrack entries of what a policy leaves untracked", func() bool { return e.entries(t, "a", cachePort) == 0 })
	end()
	t.Logf("%d questions, %d without an answer", asked.Load(), failed.Load())
}

// testPolicyGoesBesideMasquerade has a pod send data over connections while their policy
// goes: what conntrack sees first is what pods send, and a CNI masquerades that.
func (e *env) testPolicyGoesBesideMasquerade(t *testing.T) {
	const port = 11300
	defer run(t, e.MustHost(t, "a"), "nft", "delete table ip cni")
	run(t, e.MustHost(t, "a"), "nft", "add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; }; "+
		fmt.Sprintf("add rule ip cni post ip saddr %s masquerade", e.Addr("a0", false)))
	e.writeAll(t, "policy.yaml", strings.Replace(policyYAML("stream", "", ""), fmt.Sprint(cachePort), fmt.Sprint(port), 1))
	e.forgetEntries(t)
	e.startTalker(t, "a0", port)
	pod := netip.AddrPortFrom(e.Addr("a0", false), port)
	heard := e.hear(t, hearing{from: "b", to: pod}, hearing{from: "b", to: pod}, hearing{from: "b", to: pod})
	for _, when := range []string{"untracked", "their policy gone"} {
		heard.goOn(t, when)
		if n := e.entries(t, "a", port); (n > 0) != (when != "untracked") {
			t.Errorf("%s: %d entries", when, n)
		}
		if when == "untracked" {
			e.writeAll(t, "policy.yaml", "")
		}
	}
	e.writeAll(t, "policy.yaml", policyYAML("another", "", clientPods))
}

// hearing is a connection to a talker: its source host, its destination, and its
// source port, 0 for any.
type hearing struct {
	from string
	to   netip.AddrPort
	port int
}

// heard counts the messages on connections.
type heard struct {
	by     []hearing
	counts []atomic.Int64
}

// hear opens connections to talkers and reads from them.
func (e *env) hear(t *testing.T, by ...hearing) *heard {
	t.Helper()
	h := &heard{by, make([]atomic.Int64, len(by))}
	for i, c := range by {
		conn, err := e.dial(t, c.from, c.to, c.port)
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		t.Cleanup(func() { conn.Close() })
		h.by[i].port = conn.LocalAddr().(*net.TCPAddr).Port
		go func() {
			b := make([]byte, 1)
			for {
				if _, err := conn.Read(b); err != nil {
					return
				}
				h.counts[i].Add(1)
			}
		}()
	}
	return h
}

// goOn wants more to come over every connection.
func (h *heard) goOn(t *testing.T, when string) {
	t.Helper()
	for i := range h.counts {
		want := h.counts[i].Load() + 100
		await.True(t, fmt.Sprintf("%s: the connection from %s to %s continues", when, h.by[i].from, h.by[i].to),
			func() bool { return h.counts[i].Load() >= want })
	}
}

// startTalker starts a server that sends to each client without a request.
func (e *env) startTalker(t *testing.T, short string, port int) {
	t.Helper()
	var l net.Listener
	err := e.MustHost(t, short).Do(func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprint(":", port))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for {
					if _, err := conn.Write([]byte{0}); err != nil {
						return
					}
					time.Sleep(2 * time.Millisecond)
				}
			}()
		}
	}()
}

// testAnotherPod gives the cache's address to a pod that no policy selects.
func (e *env) testAnotherPod(t *testing.T) {
	e.writeAll(t, "policy.yaml", policyYAML("again", "  deny: others\n", clientPods))
	e.writePods(t, policyPods{"a0": "other", "b0": "client", "b1": "other"})
	e.expectCaching(t, "another pod's address", caching{from: "b0", tracked: true}, caching{from: "b1", tracked: true})
	e.writePods(t, policyPods{"a0": "cache", "b0": "client", "b1": "other"})
	e.expectCaching(t, "a cache's address again", caching{from: "b0"}, caching{from: "b1", denied: true})
	e.writePods(t, policyPods{"a0": "cache", "b0": "other", "b1": "client"})
	e.expectCaching(t, "other peers", caching{from: "b1"}, caching{from: "b0", denied: true})
	e.writePods(t, policyPods{"a0": "cache", "b0": "client", "b1": "other"})
}

// testPastNetfilter counts what netfilter sees of questions and answers: with eBPF
// nothing of what a policy allows, from either node, and all of the rest.
func (e *env) testPastNetfilter(t *testing.T) {
	e.writePods(t, policyPods{"a0": "cache", "a1": "client", "b0": "client", "b1": "other"})
	defer e.writePods(t, policyPods{"a0": "cache", "b0": "client", "b1": "other"})
	run(t, e.MustHost(t, "a"), "nft", "add table inet seen; add counter inet seen cache; add chain inet seen pre { type filter hook "+
		"prerouting priority -400; }; "+
		fmt.Sprintf("add rule inet seen pre tcp dport %d counter name cache; add rule inet seen pre tcp sport %[1]d counter name cache",
			cachePort))
	defer run(t, e.MustHost(t, "a"), "nft", "delete table inet seen")
	for _, deny := range []string{"", "  deny: others\n"} {
		e.writeAll(t, "policy.yaml", policyYAML("past", deny, clientPods))
		stranger := caching{from: "b1", denied: deny != "", tracked: deny == ""}
		for _, c := range []caching{{from: "b0"}, {from: "b0", v6: true}, {from: "a1"}, {from: "a1", v6: true}, stranger} {
			run(t, e.MustHost(t, "a"), "nft", "reset counters")
			e.expectCaching(t, "past netfilter", c)
			counted := run(t, e.MustHost(t, "a"), "nft", "list counters")
			if seen := !strings.Contains(counted, "packets 0 "); seen != (c == stranger) {
				t.Errorf("%+v: netfilter sees packets: %v\n%s", c, seen, counted)
			}
		}
	}
}

const cacheClusterIP, cacheNodePort = "10.96.7.7", 31211

// testPolicyAndService asks the cache through a Service. Where netfilter translates,
// the policy steps back and says so; with eBPF it holds, for the Service too.
func (e *env) testPolicyAndService(t *testing.T) {
	ebpf := e.Mode == "ebpf"
	service := fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: cache, namespace: caches}
spec: {type: NodePort, clusterIP: %s, clusterIPs: [%[1]s], ipFamilies: [IPv4], ports: [{port: %[2]d, nodePort: %[3]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: cache-1, namespace: caches, labels: {kubernetes.io/service-name: cache}}
addressType: IPv4
ports: [{port: %[2]d}]
endpoints: [{addresses: ["%[4]s"], nodeName: %[5]s, conditions: {ready: true}}]
`, cacheClusterIP, cachePort, cacheNodePort, e.Addr("a0", false), e.NodeName("a0"))
	e.writeAll(t, "service.yaml", service)
	defer e.writeAll(t, "service.yaml", "")
	within := func(seconds, from, to string, port int) bool {
		script := fmt.Sprintf(`exec 3<>/dev/tcp/%s/%d && printf 'get nothing\r\n' >&3 && head -1 <&3`, to, port)
		out, _ := e.MustHost(t, from).Command(t.Context(), "timeout", seconds, "bash", "-c", script).Output()
		return strings.HasPrefix(string(out), "END")
	}
	ask := func(from, to string, port int) bool { return within("10", from, to, port) }
	denied := func(from, to string, port int) bool { return !within("1", from, to, port) }
	node := e.Addr("a", false).String()
	told := func(what string) {
		t.Helper()
		if ebpf {
			return
		}
		await.True(t, "a line of the log: the policy "+what+" the pod", func() bool {
			log, err := os.ReadFile(e.Agent("a").Log)
			return err == nil && strings.Contains(string(log),
				`where="DoNotTrackPolicy cache" field=spec.ingress[0] what="`+what+" "+e.Addr("a0", false).String()+
					": it is an endpoint of Service caches/cache")
		})
	}
	e.writeAll(t, "policy.yaml", policyYAML("cache", "", clientPods))
	told("is not applied to")
	e.forgetEntries(t)
	if !ask("b0", cacheClusterIP, cachePort) || !ask("client0", node, cacheNodePort) {
		t.Error("the Service does not answer beside a policy")
	}
	e.expectTracked(t, "a question to the Service", "a", cachePort, !ebpf, func() {
		if !ask("b0", cacheClusterIP, cachePort) {
			t.Error("the Service does not answer beside a policy")
		}
	})
	e.forgetEntries(t)
	cut, err := e.dial(t, "a1", netip.AddrPortFrom(netip.MustParseAddr(cacheClusterIP), cachePort), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer cut.Close()
	e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n", clientPods))
	await.True(t, "the end of the entry of a connection through the Service that is cut",
		func() bool { return e.entries(t, "a", cachePort) == 0 })
	told("is applied with conntrack to")
	if !ask("b0", cacheClusterIP, cachePort) {
		t.Error("the Service does not answer a peer")
	}
	if !denied("client0", node, cacheNodePort) {
		t.Error("a denied client is answered through the Service")
	}
	if !denied("b1", cacheClusterIP, cachePort) || e.getInVain(t, "b1", e.cache("a0", false), 0) == nil {
		t.Error("a Service opens what a policy denies")
	}
	if ebpf {
		e.testDenialStays(t, func(from string) bool { return ask(from, cacheClusterIP, cachePort) },
			func(from string) bool { return denied(from, cacheClusterIP, cachePort) })
		e.testOpenPolicy(t, func() bool { return ask("client0", node, cacheNodePort) })
		// What eBPF gives to nftables is translated by netfilter with eBPF too.
		e.writeAll(t, "service.yaml", strings.Replace(service, ", nodePort:", ", appProtocol: ftp, nodePort:", 1))
		e.writeAll(t, "policy.yaml", policyYAML("given", "", ""))
		if !ask("a1", cacheClusterIP, cachePort) {
			t.Error("a port that eBPF gives away does not answer beside a policy")
		}
	}
	if !ebpf {
		e.expectMetric(t, "a", `spillway_do_not_track_refused{reason="ServiceNeedsNAT"}`)
		e.testTranslatedGoesOn(t, service)
	}
}

// testTranslatedGoesOn has a Service go, and with it the reason for which a policy did
// not hold at its endpoint: what netfilter translates goes on, and what is new is not
// tracked. When the last has ended, nothing is kept for them.
func (e *env) testTranslatedGoesOn(t *testing.T, service string) {
	const port = 11301
	e.startTalker(t, "a0", port)
	e.writeAll(t, "service.yaml", strings.NewReplacer(fmt.Sprintf("port: %d", cachePort), fmt.Sprintf("port: %d", port)).Replace(service))
	e.writeAll(t, "policy.yaml", strings.Replace(policyYAML("stream", "", ""), fmt.Sprint(cachePort), fmt.Sprint(port), 1))
	cluster, node := netip.AddrPortFrom(netip.MustParseAddr(cacheClusterIP), port), netip.AddrPortFrom(e.Addr("a", false), cacheNodePort)
	heard := e.hear(t, hearing{from: "a1", to: cluster}, hearing{from: "a", to: cluster}, hearing{from: "client0", to: node},
		hearing{from: "b", to: node})
	heard.goOn(t, "beside a Service")
	e.writeAll(t, "service.yaml", "")
	heard.goOn(t, "without it")
	tracked := e.entries(t, "a", port)
	pod := netip.AddrPortFrom(e.Addr("a0", false), port)
	e.hear(t, hearing{from: "b0", to: pod}).goOn(t, "straight to the pod")
	if n := e.entries(t, "a", port); n != tracked || n == 0 {
		t.Errorf("%d entries, were %d before a new connection", n, tracked)
	}
	e.hear(t, hearing{from: "a1", to: pod}, hearing{from: "a1", to: pod, port: heard.by[0].port}).goOn(t,
		"straight to the pod, from where one is kept, from its port too")
	e.writeAll(t, "service.yaml", service)
}

// testDenialStays restarts agents under a policy that denies: with --bypass always, and
// after a slip of the pen in its file.
func (e *env) testDenialStays(t *testing.T, ask, denied func(from string) bool) {
	defer func() { e.Flags = nil }()
	restart := func(when string) {
		for _, node := range e.Nodes() {
			e.restart(t, node, syscall.SIGTERM)
		}
		e.waitReady(t)
		if !ask("b0") || e.get(t, "b0", e.cache("a0", false), 0) != nil {
			t.Errorf("%s: a peer is not answered", when)
		}
		if !denied("b1") || e.getInVain(t, "b1", e.cache("a0", false), 0) == nil {
			t.Errorf("%s: a denied client is answered", when)
		}
	}
	for _, bypass := range []string{"always", "auto"} {
		e.Flags = map[string][]string{"": {"--bypass", bypass}}
		restart("bypass " + bypass)
	}
	policy := policyYAML("cache", "  deny: others\n", clientPods)
	e.writeAll(t, "policy.yaml", strings.Replace(policy, "deny:", "denny:", 1))
	restart("a bad file")
	if !strings.Contains(e.Agent("a").Tail(), "policy.yaml cannot be read, which may be some of it") {
		t.Errorf("it is not told that the kernel's policies are left alone:\n%s", e.Agent("a").Tail())
	}
	e.expectMetric(t, "a", "\nspillway_do_not_track_held")
	e.writeAll(t, "policy.yaml", strings.Replace(policy, "deny: others", "track: false", 1))
	if !ask("b1") {
		t.Error("when the file is mended, it is not applied")
	}
}

// testOpenPolicy counts what a hook of netfilter sees of a Service's packets to a
// pod that a NetworkPolicy selects: all, unless a policy opens the port to anybody.
func (e *env) testOpenPolicy(t *testing.T, ask func() bool) {
	e.writeAll(t, "networkpolicy.yaml", `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: caches, namespace: caches}
spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{}]}
`)
	defer e.writeAll(t, "networkpolicy.yaml", "")
	run(t, e.MustHost(t, "a"), "nft", "add table inet seen; add chain inet seen forward { type filter hook forward priority 0; }; "+
		fmt.Sprintf("add counter inet seen cache; add rule inet seen forward tcp dport %d counter name cache", cachePort))
	defer run(t, e.MustHost(t, "a"), "nft", "delete table inet seen")
	for _, c := range []struct {
		peers string
		seen  bool
	}{{fmt.Sprintf("{ipBlock: {cidr: %s/32}}", e.Addr("client0", false)), true}, {"", false}} {
		e.writeAll(t, "policy.yaml", policyYAML("cache", "", c.peers))
		await.NoError(t, func() error { // the last packets of earlier connections may be late
			e.forgetEntries(t)
			run(t, e.MustHost(t, "a"), "nft", "reset counters")
			if !ask() {
				t.Errorf("peers %q: no answer", c.peers)
			}
			counted := run(t, e.MustHost(t, "a"), "nft", "list counters")
			if seen := !strings.Contains(counted, "packets 0 "); seen != c.seen {
				return fmt.Errorf("peers %q: a hook of netfilter sees packets: %v, want %v\n%s", c.peers, seen, c.seen, counted)
			}
			if n := e.entries(t, "a", cachePort); n > 0 {
				return fmt.Errorf("peers %q: %d entries", c.peers, n)
			}
			return nil
		})
	}
}
