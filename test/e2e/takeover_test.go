package e2e

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

// kubeProxy is a real kube-proxy on one node.
type kubeProxy struct {
	host *topology.Host
	argv []string
	path string // PATH, with the programs called iptables that it is to use
	cmd  *topology.Cmd
	log  bytes.Buffer
}

// proxySetup is a mode of kube-proxy and, for iptables, the programs it finds.
type proxySetup struct{ mode, variant string }

var proxyFlag = flag.String("kube-proxy", "nftables", "mode of the kube-proxy to take over from: nftables, iptables-nft or iptables-legacy")

// askedSetup reads proxyFlag.
func askedSetup() proxySetup {
	mode, variant, _ := strings.Cut(*proxyFlag, "-")
	return proxySetup{mode, variant}
}

// newKubeProxy prepares a kube-proxy of a node. It changes nothing that belongs
// to the whole machine.
func (e *env) newKubeProxy(t *testing.T, node string, setup proxySetup) *kubeProxy {
	t.Helper()
	host, err := e.Host(node)
	if err != nil {
		t.Fatal(err)
	}
	program, err := controlplane.Program("kube-proxy")
	if err != nil {
		t.Fatal(err)
	}
	p := &kubeProxy{host: host, path: os.Getenv("PATH")}
	if setup.variant != "" {
		dir := t.TempDir()
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, action := range []string{"", "-save", "-restore"} {
				if err := os.Symlink("/usr/sbin/"+family+"-"+setup.variant+action, filepath.Join(dir, family+action)); err != nil {
					t.Fatal(err)
				}
			}
		}
		p.path = dir + ":" + p.path
	}
	p.argv = []string{program, "--proxy-mode", setup.mode, "--kubeconfig", e.API.Kubeconfig,
		"--hostname-override", host.Name, "--cluster-cidr", e.Spec.ClusterCIDR4.String() + "," + e.Spec.ClusterCIDR6.String(),
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
		"--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0"}
	t.Cleanup(func() { p.stop(t) })
	return p
}

func (p *kubeProxy) start(t *testing.T) {
	t.Helper()
	p.log.Reset()
	p.cmd = p.host.Command(context.Background(), p.argv...)
	for i, v := range p.cmd.Env {
		if strings.HasPrefix(v, "PATH=") {
			p.cmd.Env[i] = "PATH=" + p.path
		}
	}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
}

// stop ends kube-proxy; its rules stay.
func (p *kubeProxy) stop(t *testing.T) {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait()
	p.cmd = nil
	if t.Failed() {
		t.Logf("the log of kube-proxy on %s ends with:\n%s", p.host.Name, tail(p.log.String(), 20))
	}
}

// waitSynced waits until kube-proxy has written its rules, in both families. Its
// /healthz says that it is well before that.
func (p *kubeProxy) waitSynced(t *testing.T) {
	t.Helper()
	client := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DialContext: p.host.Dial, DisableKeepAlives: true}}
	synced := regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds\{[^}]*\} [1-9]`)
	await.True(t, "the rules of kube-proxy on "+p.host.Name, func() bool {
		resp, err := client.Get("http://127.0.0.1:10249/metrics")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return len(synced.FindAll(text, -1)) == 2
	})
}

// proxyRules lists what kube-proxy has in a node's kernel, of what a take-over
// has to remove, and what others have that must stay.
func (e *env) proxyRules(t *testing.T, node string) (own, others []string) {
	t.Helper()
	host, err := e.Host(node)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(run(t, host, "nft", "list", "tables")) {
		if line = strings.TrimSpace(line); strings.HasSuffix(line, " kube-proxy") {
			own = append(own, line)
		}
	}
	for _, program := range []string{"iptables-legacy-save", "ip6tables-legacy-save", "iptables-nft-save", "ip6tables-nft-save"} {
		for line := range strings.Lines(run(t, host, program)) {
			line = strings.TrimSpace(line)
			switch {
			case !strings.Contains(line, "KUBE-"):
			case strings.Contains(line, "KUBE-FIREWALL") || strings.Contains(line, "KUBE-KUBELET-CANARY") ||
				strings.Contains(line, "KUBE-IPTABLES-HINT"):
				others = append(others, program+": "+line)
			default:
				own = append(own, program+": "+line)
			}
		}
	}
	return own, others
}

func logged(a *cluster.Agent, text string) func() bool {
	return func() bool {
		log, _ := os.ReadFile(a.Log)
		return strings.Contains(string(log), text)
	}
}

// startBesideKubeProxy builds a cluster whose Services a kube-proxy on each node
// serves. netfilter translates nothing else there: only Spillway
// can keep running connections translated.
func startBesideKubeProxy(t *testing.T, setup proxySetup) (*env, *suite.File, []*kubeProxy) {
	t.Helper()
	t.Parallel()
	story := tellStory(t)
	h := harness.Start(t, cluster.Config{
		Spec: topology.DefaultSpec("e2e-takeover"), FromAPI: true, NoAgents: true,
		Flags: map[string][]string{"": {"--takeover=kube-proxy"}},
	})
	e := &env{Harness: h, story: story}
	story.step("start kube-proxy")
	var proxies []*kubeProxy
	s := e.NewFile()
	s.MustWrite(t, nodePort("a0", "b0"))
	for _, node := range e.Nodes() {
		if setup.variant != "" {
			host, _ := e.Host(node)
			kubelet := host.Command(t.Context(), "iptables-"+setup.variant+"-restore", "--noflush", "--wait")
			kubelet.Stdin = strings.NewReader("*mangle\n:KUBE-KUBELET-CANARY - [0:0]\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n" +
				"*filter\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\nCOMMIT\n")
			if out, err := kubelet.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		p := e.newKubeProxy(t, node, setup)
		p.start(t)
		proxies = append(proxies, p)
	}
	for _, p := range proxies {
		p.waitSynced(t)
	}
	story.step("ask kube-proxy")
	for _, f := range askers {
		for _, combo := range flows.AllCombos {
			probe, dst := e.MustProbe(t, f.From), s.MustAddress(t, f.To, combo)
			await.True(t, "kube-proxy serving "+dst, func() bool { a := ask(t, probe, dst, combo, 1); return len(a) == 1 && a[0].Server != "" })
		}
	}
	return e, s, proxies
}

// TestTakingOverFromKubeProxyKeepsRunningConnections goes from a real kube-proxy to
// Spillway and back, under load: new connections all the time, and connections
// that were made before and stay.
func TestTakingOverFromKubeProxyKeepsRunningConnections(t *testing.T) {
	e, s, proxies := startBesideKubeProxy(t, askedSetup())
	forget := e.leaveUntracked(t, "a0", 8080)
	e.takeOver(t, s, proxies)
	forget()
	e.goBack(t, s, proxies)
}

// leaveUntracked gives the API server a do-not-track policy for a port of a pod, until
// the function that it returns is called.
func (e *env) leaveUntracked(t *testing.T, short string, port int) (forget func()) {
	t.Helper()
	crd, err := os.ReadFile("../../deploy/helm/spillway/crds/donottrackpolicies.yaml")
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(e.API.REST())
	if err != nil {
		t.Fatal(err)
	}
	send := func(verb, path, text string) error {
		return client.RESTClient().Verb(verb).AbsPath(path).SetHeader("Content-Type",
			"application/yaml").Body([]byte(text)).Do(t.Context()).Error()
	}
	const pods, policies = "/api/v1/namespaces/default/pods", "/apis/policy.spillway.dev/v1alpha1/donottrackpolicies"
	pod := fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: cache, namespace: default, labels: {role: cache}}
spec: {nodeName: %s, containers: [{name: cache, image: cache}]}
status: {podIP: %s, podIPs: [{ip: %[2]s}, {ip: %s}]}
`, e.NodeName(short), e.Addr(short, false), e.Addr(short, true))
	policy := strings.Replace(policyYAML("web", "", ""), fmt.Sprint(cachePort), fmt.Sprint(port), 1)
	for _, err := range []error{
		send("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", string(crd)), send("POST", pods, pod),
		send("PUT", pods+"/cache/status", pod),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	await.True(t, "the policy", func() bool { return send("POST", policies, policy) == nil })
	return func() {
		var before []time.Time
		for _, node := range e.Nodes() {
			last, err := e.Agent(node).LastSync(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			before = append(before, last)
		}
		if err := send("DELETE", policies+"/web", ""); err != nil {
			t.Fatal(err)
		}
		for i, node := range e.Nodes() {
			await.True(t, "a sync without the policy on "+node, func() bool {
				now, err := e.Agent(node).LastSync(t.Context())
				return err == nil && now.After(before[i])
			})
		}
	}
}

func (e *env) takeOver(t *testing.T, s *suite.File, proxies []*kubeProxy) {
	t.Helper()
	e.startNewConnections(t, s)
	inFlight := len(e.streams)
	e.startConnections(t, s, askers, 4)
	e.story.step("start the agents")
	for _, node := range e.Nodes() {
		if err := e.Agent(node).Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for i, node := range e.Nodes() {
		await.True(t, "the refusal while kube-proxy runs", logged(e.Agent(node), "kube-proxy still runs here"))
		if own, _ := e.proxyRules(t, node); len(own) == 0 {
			e.story.errorf(t, "the rules of a running kube-proxy are gone from %s", node)
		}
		e.story.step("stop kube-proxy on %s", node)
		proxies[i].stop(t)
		e.story.step("wait for the take-over on %s", node)
		await.True(t, "the take-over", logged(e.Agent(node), "took over from kube-proxy"))
		own, others := e.proxyRules(t, node)
		if len(own) > 0 {
			e.story.errorf(t, "left of kube-proxy on %s: %q", node, own)
		}
		if askedSetup().variant != "" && len(others) < 4 {
			e.story.errorf(t, "of kubelet's chains only these are left on %s: %q", node, others)
		}
	}
	e.story.step("wait for /healthz")
	e.waitReady(t) // the health port is its own now
	e.askMore(t, 20)
	e.awaitKept(t)
	e.endRunningFirst(t, inFlight)
	e.expectRelease(t)
	for _, node := range e.Nodes() {
		log, _ := os.ReadFile(e.Agent(node).Log)
		if n := strings.Count(string(log), "kube-proxy still runs here"); n != 1 {
			e.story.errorf(t, "%s says %d times that kube-proxy runs, want once", node, n)
		}
	}
}

// expectRelease wants that translation is kept as long as a connection needs
// it, and not longer.
func (e *env) expectRelease(t *testing.T) {
	t.Helper()
	const keeper = "table inet spillway-takeover"
	for _, node := range e.Nodes() {
		host, _ := e.Host(node)
		if !strings.Contains(run(t, host, "nft", "list", "tables"), keeper) {
			e.story.errorf(t, "nothing keeps the connections of kube-proxy translated on %s", node)
		}
		e.story.step("flush conntrack on %s", node)
		run(t, host, "conntrack", "-F")
		await.True(t, "the end of what kept them translated",
			func() bool { return !strings.Contains(run(t, host, "nft", "list", "tables"), keeper) })
	}
}

// goBack starts kube-proxy in the place of an agent that has ended, and cleans
// up. What sockets were given stays; each packet of the other connections was
// translated by the programs that go.
func (e *env) goBack(t *testing.T, s *suite.File, proxies []*kubeProxy) {
	t.Helper()
	e.startNewConnections(t, s)
	inFlight := len(e.streams)
	e.startConnections(t, s, []flows.Flow{{From: "a1", To: flows.ClusterIP}, {From: "b", To: flows.ClusterIP}}, 4)
	e.startFromUsedPorts(t, s)
	for i, node := range e.Nodes() {
		e.story.step("end the agent on %s", node)
		if err := e.Agent(node).Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		e.story.step("start kube-proxy on %s", node)
		proxies[i].start(t)
		proxies[i].waitSynced(t)
		e.story.step("clean up on %s", node)
		var err error
		e.askFromUsedPorts(t, s, func() { err = e.Agent(node).Cleanup(t.Context()) })
		if err != nil {
			t.Fatal(err)
		}
		if left := e.residue(t, node); len(left) > 0 {
			e.story.errorf(t, "clean-up left on %s: %v", node, left)
		}
		if own, _ := e.proxyRules(t, node); len(own) == 0 {
			e.story.errorf(t, "clean-up took kube-proxy's rules away on %s", node)
		}
	}
	e.askMore(t, 10)
	e.endRunningFirst(t, inFlight)
}

// endRunningFirst ends the streams that keep a socket, which come behind the fresh
// ones, and then these.
func (e *env) endRunningFirst(t *testing.T, fresh int) {
	t.Helper()
	e.story.step("end the streams")
	all := e.streams
	for _, part := range [][]stream{all[fresh:], all[:fresh]} {
		e.streams = part
		e.endStreams(t)
	}
}

// usedPorts are local ports of connections whose sockets Spillway has translated.
var usedPorts = []int{41000, 41001, 41002, 41003}

// startFromUsedPorts starts a stream of TCP over one connection from each of them.
func (e *env) startFromUsedPorts(t *testing.T, s *suite.File) {
	t.Helper()
	p := e.MustProbe(t, "a1")
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6} {
		for _, port := range usedPorts {
			st := stream{fmt.Sprintf("%s from a1, port %d", combo, port), p}
			_, err := p.Do(t.Context(), probe.Request{
				Op: probe.Stream, Name: st.name, Proto: "tcp", Dst: s.MustAddress(t, flows.ClusterIP, combo), PauseMS: 20,
				TimeoutMS: 10_000, LocalPort: port,
			})
			if err != nil {
				t.Fatalf("start %s: %v", st.name, err)
			}
			e.streams = append(e.streams, st)
		}
	}
}

// askFromUsedPorts asks the Service from ports that connections to its endpoints
// have, until done ends: the kernel assigns a port twice if the addresses differ, as
// the addresses of a Service and of its endpoint do, and kube-proxy may choose that
// endpoint. For sockets that Spillway translates, the kernel refuses a tuple in use.
func (e *env) askFromUsedPorts(t *testing.T, s *suite.File, done func()) {
	t.Helper()
	var asking sync.WaitGroup
	var ended atomic.Bool
	var asked atomic.Int64
	p := e.MustProbe(t, "a1")
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6} {
		dst := s.MustAddress(t, flows.ClusterIP, combo)
		asking.Go(func() {
			for i := 0; !ended.Load(); i++ {
				port := usedPorts[i%len(usedPorts)]
				resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", Dst: dst, TimeoutMS: 4000, LocalPort: port})
				if err != nil {
					t.Error(err)
					return
				}
				a := resp.Answers[0]
				if strings.Contains(a.Detail, unix.EADDRNOTAVAIL.Error()) {
					continue
				}
				asked.Add(1)
				time.Sleep(5 * time.Millisecond)
				if a.Server == "" {
					e.story.errorf(t, "%s from a1 by port %d, which a connection to an endpoint has: %s (%s)", combo, port, a.Err, a.Detail)
				}
			}
		})
	}
	done()
	ended.Store(true)
	asking.Wait()
	t.Logf("%d questions from ports in use", asked.Load())
}
