package e2e

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// webPort is the port of every host's server, and hostPort leads there too.
const webPort = 8080

// hostPortChains is a hostPort as the CNI plugin portmap writes it for each family.
const hostPortChains = `*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-DN-4d0e0f1e7ac3b5ae0a1b2 - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"cbr0\" id: \"4d0e\"" -m multiport --dports HOST -j CNI-DN-4d0e0f1e7ac3b5ae0a1b2
-A CNI-HOSTPORT-DNAT -p udp -m comment --comment "dnat name: \"cbr0\" id: \"4d0e\"" -m multiport --dports HOST -j CNI-DN-4d0e0f1e7ac3b5ae0a1b2
-A CNI-DN-4d0e0f1e7ac3b5ae0a1b2 -p tcp -m tcp --dport HOST -j DNAT --to-destination ADDR
-A CNI-DN-4d0e0f1e7ac3b5ae0a1b2 -p udp -m udp --dport HOST -j DNAT --to-destination ADDR
COMMIT
`

// TestAnEndpointThatIsAlsoAHostPort asks a pod by a port of its node, to which netfilter
// translates, while the same port of the pod is an endpoint of a Service. The answers
// must go through netfilter, whenever the rules appeared.
func TestAnEndpointThatIsAlsoAHostPort(t *testing.T) {
	t.Parallel()
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			spec := topology.DefaultSpec("e2e-hostport-" + variant)
			spec.Masquerade = true
			e := startSpec(t, spec)
			e.Flags = map[string][]string{"": {"--iptables-sync-period", "1s"}}
			e.restartAll(t)
			s := e.Load(t, nodePort("a0"))
			e.expect(t, "no hostPort yet", s, "a0")
			e.expectHostPort(t, "no hostPort yet", false)

			e.restoreRules(t, variant, hostPortChains)
			e.waitHostPort(t) // legacy rules are polled
			e.expectHostPort(t, "at once", true)
			e.expect(t, "at once", s, "a0")
			for range 2 {
				e.waitFullSync(t)
			}
			e.expectHostPort(t, "two full syncs later", true)
			e.expect(t, "two full syncs later", s, "a0")

			e.restartAll(t)
			e.expectHostPort(t, "after a restart", true)
			e.expect(t, "after a restart", s, "a0")
		})
	}
}

// TestHostPortsWithoutPortmap serves a Pod's host port by the agent, alone and beside the rules of
// portmap, with a process of the node on the same port, and against a Service that wants it.
func TestHostPortsWithoutPortmap(t *testing.T) {
	t.Parallel()
	spec := topology.DefaultSpec("e2e-hostports")
	spec.Masquerade = true
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{"": {"--host-ports"}}})}
	pod := e.Load(t, flows.HostPorts{Pod: "a0", Port: hostPort})
	e.expectHostPort(t, "by the agent", true)
	if text := oneLine(e.spillway(t, "a", "services", pod.Scope.Namespace+"/pod/a0")); !strings.Contains(text,
		fmt.Sprint("*:", hostPort, " nodePort all")) || !strings.Contains(text, "the kernel holds what is wanted") {
		t.Errorf("services shows the host port as %s", text)
	}
	e.restart(t, "a", syscall.SIGKILL)
	e.waitReady(t)
	e.expectHostPort(t, "after a restart", true)

	doctor := func() string {
		return oneLine(e.run(t, "doctor", "--netns", "here", "--sample", "0", "--api-socket", e.Agent("a").Socket(),
			"--finding", "node-port-taken"))
	}
	taken := fmt.Sprintf("the hostPort of Pod %s takes port %d/TCP from a process of the node", pod.Scope.Namespace+"/a0", hostPort)
	if text := doctor(); strings.Contains(text, taken) {
		t.Errorf("doctor finds a process on a free port: %s", text)
	}
	must.Do(t, e.MustHost(t, "a").Do(func() error {
		l, err := net.Listen("tcp", fmt.Sprint(":", hostPort))
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
	e.expectHostPort(t, "with a process of the node on the port", true)
	// The agent examines the node again after a while.
	await.NoError(t, func() error {
		if text := doctor(); !strings.Contains(text, taken) {
			return fmt.Errorf("doctor does not find %q: %s", taken, text)
		}
		return nil
	})

	e.restoreRules(t, "nft", hostPortChains)
	e.expectHostPort(t, "beside portmap", true)

	pod.MustWrite(t, flows.Pods{"a0"})
	pod.MustWait(t)
	status := oneLine(e.spillway(t, "a", "services"))
	if strings.Contains(status, "pod/a0") {
		t.Errorf("a Pod without host ports is still served: %s", status)
	}
}

func (e *env) restartAll(t *testing.T) {
	t.Helper()
	for _, node := range e.Nodes() {
		e.restart(t, node, syscall.SIGTERM)
	}
	e.waitReady(t)
}

// restoreRules writes rules of iptables on node a, for both families. Like portmap it then deletes
// the UDP entries of conntrack for the hostPort: the rules do not translate what netfilter has seen
// before, and a client may have the port of such a question again.
func (e *env) restoreRules(t *testing.T, variant, rules string) {
	t.Helper()
	for _, v6 := range []bool{false, true} {
		program := "iptables-" + variant + "-restore"
		if v6 {
			program = "ip6tables-" + variant + "-restore"
		}
		addr := net.JoinHostPort(e.Addr("a0", v6).String(), fmt.Sprint(webPort))
		cmd := e.MustHost(t, "a").Command(t.Context(), program, "--noflush", "--wait")
		cmd.Stdin = strings.NewReader(strings.NewReplacer("HOST", fmt.Sprint(hostPort), "ADDR", addr).Replace(rules))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", program, err, out)
		}
	}
	e.Do(t, "a", func() error {
		var filter netlink.ConntrackFilter
		err := errors.Join(filter.AddProtocol(unix.IPPROTO_UDP), filter.AddPort(netlink.ConntrackOrigDstPort, hostPort))
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			_, deleted := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, &filter)
			err = errors.Join(err, deleted)
		}
		return err
	})
}

// expectHostPort asks from the other node, its pods, pods of the same node, the node
// itself and a machine outside.
func (e *env) expectHostPort(t *testing.T, when string, answers bool) {
	t.Helper()
	want, tries, timeoutMS := "a0", 4, patienceMS
	if !answers {
		want, tries, timeoutMS = "", 1, silenceMS
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, from := range []string{"b", "b0", "b1/vm", "a1", "a2/vm", "a", "client0"} {
		p := e.MustProbe(t, from)
		for _, combo := range flows.AllCombos {
			dst := net.JoinHostPort(e.Addr("a", combo.IPv6()).String(), fmt.Sprint(hostPort))
			wg.Go(func() {
				for _, a := range askFor(t, p, dst, combo, tries, timeoutMS) {
					if a.Server != want {
						t.Errorf("%s: %s by the hostPort, %s: answer %+v, want server %q", when, from, combo, a, want)
						return
					}
				}
			})
		}
	}
}

// waitHostPort waits until the agent of node a has seen the rules: questions of a pod beside, of
// another node and of a machine outside are answered.
func (e *env) waitHostPort(t *testing.T) {
	t.Helper()
	for _, from := range []string{"a1", "b", "client0"} {
		for _, combo := range flows.AllCombos {
			dst := net.JoinHostPort(e.Addr("a", combo.IPv6()).String(), fmt.Sprint(hostPort))
			await.True(t, fmt.Sprintf("an answer by the hostPort, %s from %s", combo, from), func() bool {
				return askOnce(t, e.MustProbe(t, from), dst, combo, false)[0].Server == "a0"
			})
		}
	}
}

// waitFullSync waits until every agent has written its state once more.
func (e *env) waitFullSync(t *testing.T) {
	t.Helper()
	for _, node := range e.Nodes() {
		before, err := e.Agent(node).LastSync(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		await.True(t, "a full sync on "+node, func() bool {
			now, err := e.Agent(node).LastSync(t.Context())
			return err == nil && now.After(before)
		})
	}
}
