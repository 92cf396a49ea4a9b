package e2e

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/internal/diagnosis/trace"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestPodsLeaveWithTheNodesAddress: pods ask a host outside, beside a CNI that masquerades. Every dataplane
// gives them the node's address, as the CNI does, and packets to pods of other nodes keep theirs. Nothing is
// lost when egress is switched on and off, when the agent is restarted or killed, or when the dataplane changes.
func TestPodsLeaveWithTheNodesAddress(t *testing.T) {
	spec := topology.DefaultSpec("e2e-egress")
	spec.Masquerade = true
	e := startSpec(t, spec)
	e.askOutside(t, "")
	off, auto := map[string][]string{}, map[string][]string{"": {"--egress", "auto"}}
	for _, step := range []struct {
		mode  string
		flags map[string][]string
		sig   syscall.Signal
	}{
		{"ebpf", auto, syscall.SIGTERM}, {"ebpf", auto, syscall.SIGKILL}, {"ebpf", off, syscall.SIGTERM}, {"ebpf", auto, syscall.SIGTERM},
		{"nftables", auto, syscall.SIGTERM}, {"iptables", auto, syscall.SIGTERM}, {"iptables", off, syscall.SIGTERM},
		{"ebpf", auto, syscall.SIGTERM},
	} {
		what := fmt.Sprintf("%s, egress %v", step.mode, step.flags[""])
		e.Mode, e.Flags = step.mode, step.flags
		e.restartAfter(t, "a", step.sig, func() { e.askMore(t, 2) })
		e.waitReady(t)
		e.waitOnly(t, "a", step.mode)
		if step.mode == "ebpf" && len(step.flags) > 0 {
			before := e.egressCreated(t)
			await.True(t, what+": the agent has read the CNI's rules", func() bool { return e.egressCreated(t) > before })
			e.wantUntracked(t)
		}
		e.wantNodesAddress(t, what)
		e.askMore(t, 5)
	}
	e.leaveDestination(t)
	e.leaveMetadataServer(t)
	e.selectPod(t)
	e.endStreams(t)
	e.traceOutside(t)
	e.wantEgressAddresses(t)
}

// wantEgressAddresses: pods get the node's addresses of --egress-addresses, by the last four bits of their own. One that
// the node loses is used no longer.
func (e *env) wantEgressAddresses(t *testing.T) {
	t.Helper()
	own := map[bool][]netip.Addr{
		false: {netip.MustParseAddr("172.30.0.240"), netip.MustParseAddr("172.30.0.241")},
		true:  {netip.MustParseAddr("fd30::f0"), netip.MustParseAddr("fd30::f1")},
	}
	devices := []string{"eth0", "lo"}
	for _, list := range own {
		for i, a := range list {
			// Deprecated, as keepalived adds a virtual address of IPv6: a range that names it alone takes it.
			e.Output(t, "a", "ip", "address", "add", a.String(), "dev", devices[i], "nodad", "valid_lft", "forever", "preferred_lft", "0")
		}
	}
	// No device announces an IPv6 address of lo to its neighbors.
	e.Output(t, "client0", "ip", "route", "add", own[true][1].String(), "via", e.Addr("a", true).String())
	wantAs := func(what string, n int) {
		t.Helper()
		for _, pod := range []string{"a1", "a2"} {
			for _, combo := range flows.AllCombos {
				bytes := e.Addr(pod, combo.IPv6()).AsSlice()
				want := own[combo.IPv6()][int(bytes[len(bytes)-1]&15)%n]
				await.True(t, fmt.Sprintf("%s: %s leaves as %s, %s", what, pod, want, combo), func() bool {
					for _, a := range ask(t, e.MustProbe(t, pod), e.outside(combo).String(), combo, 3) {
						if seen, err := netip.ParseAddrPort(a.Source); err != nil || seen.Addr().Unmap() != want {
							return false
						}
					}
					return true
				})
			}
		}
	}
	for _, mode := range []string{"iptables", "nftables", "ebpf"} {
		e.Mode, e.Flags = mode, map[string][]string{"": {
			"--egress", "auto", "--egress-addresses", "172.30.0.240/32,172.30.0.241/32,fd30::f0/128,fd30::f1/128",
		}}
		e.restartAfter(t, "a", syscall.SIGTERM, func() {})
		e.waitReady(t)
		wantAs(mode, 2)
	}
	for _, list := range own {
		e.Output(t, "a", "ip", "address", "delete", list[1].String(), "dev", devices[1])
	}
	wantAs("an address lost", 1)
}

// traceOutside: trace explains a pod's connection to the outside, and tries it.
func (e *env) traceOutside(t *testing.T) {
	t.Helper()
	for _, combo := range flows.TCP {
		r := e.traceWith(t, "--from", e.Addr("a1", combo.IPv6()).String(), "--to", e.outside(combo).String())
		want := "leaves the cluster as " + netip.AddrPortFrom(e.Addr("a", combo.IPv6()), 0).String()
		if !strings.HasPrefix(r.Decision, strings.TrimSuffix(want, "0")) || r.Refused || r.Probe.Result != "connected" ||
			step(r, "egress").State != trace.Passed {
			t.Errorf("%s: %+v, probe %+v; want %q", combo, r, r.Probe, want)
		}
	}
}

// leaveDestination: a rule appears that may translate packets to the destination, so new connections to it are left to
// netfilter, and go away again. Connections that have the node's address from the programs go on.
func (e *env) leaveDestination(t *testing.T) {
	t.Helper()
	rules := func(operation string) {
		for command, addr := range map[string]netip.Addr{"iptables": e.Addr("client0", false), "ip6tables": e.Addr("client0", true)} {
			e.Output(t, "a", command, "-t", "nat", operation, "PREROUTING", "-p", "udp", "--dport", "53", "-d", addr.String(), "-j", "REDIRECT")
		}
	}
	e.askOutside(t, "later ") // netfilter has the connections that began before the first agent
	e.askMore(t, 2)
	rules("-I")
	await.True(t, "new connections are left to netfilter", func() bool { return !e.egressGrows(t) })
	e.askMore(t, 5)
	rules("-D")
	await.True(t, "new connections get the node's address from the programs again", func() bool { return e.egressGrows(t) })
}

// leaveMetadataServer: a host blocks pods from its cloud's metadata server by a rule of FORWARD, as AKS does. It holds.
func (e *env) leaveMetadataServer(t *testing.T) {
	t.Helper()
	const server, other = "168.63.129.16", "168.63.129.17"
	for _, addr := range []string{server, other} {
		e.Output(t, "client0", "ip", "address", "add", addr, "dev", "lo")
		e.Output(t, "a", "ip", "route", "add", addr, "via", e.Addr("client0", false).String())
		e.Output(t, "a", "iptables", "-I", "FORWARD", "-d", addr, "-p", "tcp", "--dport", "8080", "-j", "DROP")
	}
	reaches := func(addr string) bool {
		resp, err := e.MustProbe(t, "a1").Do(t.Context(), probe.Request{
			Op: probe.Try, Proto: "tcp", Dst: addr + ":8080", Tries: 1, TimeoutMS: silenceMS,
		})
		must.Do(t, err)
		return resp.Answers[0].Err == probe.OK
	}
	// Packets of the other address bypass the rule, so the test sees which one is left to netfilter.
	await.True(t, "a pod reaches an address that a rule of FORWARD drops", func() bool { return reaches(other) })
	if reaches(server) {
		t.Error("a pod reaches its cloud's metadata server past a rule of FORWARD")
	}
	for _, addr := range []string{server, other} {
		e.Output(t, "a", "iptables", "-D", "FORWARD", "-d", addr, "-p", "tcp", "--dport", "8080", "-j", "DROP")
		e.Output(t, "a", "ip", "route", "delete", addr)
		e.Output(t, "client0", "ip", "address", "delete", addr+"/32", "dev", "lo")
	}
}

// selectPod: a NetworkPolicy selects the pod, so new connections to the outside are left to netfilter, until the policy is
// deleted. Connections that have the node's address from the programs go on.
func (e *env) selectPod(t *testing.T) {
	t.Helper()
	policy := e.Load(t, flows.Policy{Pods: []string{"a1"}})
	await.True(t, "new connections of a selected pod are left to netfilter", func() bool { return !e.egressGrows(t) })
	e.wantNodesAddress(t, "with a NetworkPolicy")
	e.askMore(t, 5)
	policy.MustWrite(t, flows.Pods{"a1"})
	await.True(t, "new connections get the node's address from the programs without the policy", func() bool { return e.egressGrows(t) })
}

// egressGrows asks more, also by new connections, and reports whether the programs have seen any begin.
func (e *env) egressGrows(t *testing.T) bool {
	t.Helper()
	before := e.egressCreated(t)
	e.askMore(t, 3)
	return e.egressCreated(t) > before
}

// outside is the address of client0's server.
func (e *env) outside(combo flows.Combo) netip.AddrPort {
	return netip.AddrPortFrom(e.Addr("client0", combo.IPv6()), 8080)
}

// askOutside starts streams of a pod to the outside.
func (e *env) askOutside(t *testing.T, prefix string) {
	t.Helper()
	p := e.MustProbe(t, "a1")
	for _, combo := range flows.AllCombos {
		for _, proto := range []string{combo.Protocol(), "new-" + combo.Protocol()} {
			st := stream{fmt.Sprintf("%s%s stream to the outside, %s", prefix, proto, combo), p}
			_, err := p.Do(t.Context(), probe.Request{
				Op: probe.Stream, Name: st.name, Proto: proto, Dst: e.outside(combo).String(), PauseMS: 20,
			})
			if err != nil {
				t.Fatalf("start %s: %v", st.name, err)
			}
			e.streams = append(e.streams, st)
		}
	}
}

// wantNodesAddress asks from a pod: outside it has its node's address, and pods of other nodes see its own.
func (e *env) wantNodesAddress(t *testing.T, what string) {
	t.Helper()
	p := e.MustProbe(t, "a1")
	for _, combo := range flows.AllCombos {
		for dst, want := range map[netip.AddrPort]netip.Addr{
			e.outside(combo): e.Addr("a", combo.IPv6()),
			netip.AddrPortFrom(e.Addr("b1", combo.IPv6()), 8080): e.Addr("a1", combo.IPv6()),
		} {
			for _, a := range ask(t, p, dst.String(), combo, 3) {
				if seen, err := netip.ParseAddrPort(a.Source); err != nil || seen.Addr().Unmap() != want {
					t.Errorf("%s: %s to %s, %s: answer %+v, want from %s", what, "a1", dst, combo, a, want)
				}
			}
		}
	}
}

// egressCreated is the number of connections to the outside that the programs of node a have seen begin.
func (e *env) egressCreated(t *testing.T) int {
	t.Helper()
	text, err := e.Agent("a").Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if value, found := strings.CutPrefix(line, `spillway_ebpf_verdicts_total{verdict="egress_created"} `); found {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
	}
	return 0
}

// wantUntracked: conntrack of node a does not see a new connection of pod a2, and no ping.
func (e *env) wantUntracked(t *testing.T) {
	t.Helper()
	const port = 45678
	p := e.MustProbe(t, "a2")
	for _, combo := range flows.AllCombos {
		resp, err := p.Do(t.Context(), probe.Request{
			Op: probe.Try, Proto: combo.Protocol(), Dst: e.outside(combo).String(), Tries: 1, LocalPort: port, TimeoutMS: patienceMS,
		})
		if err != nil || len(resp.Answers) != 1 || resp.Answers[0].Err != probe.OK {
			t.Fatalf("a2 to the outside, %s: %+v, %v", combo, resp.Answers, err)
		}
	}
	e.wantPings(t, port)
	host, err := e.Host("a")
	if err != nil {
		t.Fatal(err)
	}
	pod := regexp.MustCompile(fmt.Sprintf(`src=(%s|%s) .*(sport|id)=%d `, regexp.QuoteMeta(e.Addr("a2", false).String()),
		e.Addr("a2", true).StringExpanded(), port))
	err = host.Do(func() error {
		f, err := os.Open("/proc/thread-self/net/nf_conntrack")
		if err != nil {
			return err
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if pod.MatchString(lines.Text()) {
				t.Errorf("conntrack has the connection of a pod: %s", lines.Text())
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
