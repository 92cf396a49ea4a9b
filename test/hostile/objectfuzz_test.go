package hostile

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

var tenantForwarding = flag.String("tenant-forwarding", "",
	"--forwarding of the agents beside random tenants, with a CNI that masquerades: hybrid or dsr")

var tenantSteps = flag.Int("tenant-steps", 0, "steps of random tenants (default: 12, and 48 without -short)")

// objectFuzzer plays a tenant that writes random objects beside honest Services of other
// namespaces. The same seed writes the same objects.
type objectFuzzer struct {
	*env
	tenant  *tenant
	r       *rand.Rand // of the honest tenants
	honest  tenantState
	history []string // the changes of the last steps
	objects int      // that were written
}

// TestRandomTenants: whatever objects a namespace has, the Services of others are served by their
// own endpoints, what changes of them arrives, their protections hold, and the agents are healthy
// and log little.
func TestRandomTenants(t *testing.T) {
	t.Parallel()
	flags := []string{"--host-ports", "--outlier-ejection", "--max-source-ranges=1024"}
	if *tenantForwarding != "" {
		flags = append(flags, "--forwarding", *tenantForwarding, "--dsr-key-file", secretFile(t))
	}
	e := startOf(t, topology.Spec{Name: "hostile-objects", PodNetwork: topology.Routed, Masquerade: *tenantForwarding != ""}, flags...)
	e.enforce(t, fmt.Sprintf("ip daddr %s drop\nip6 daddr %s drop", e.Addr(selected, false), e.Addr(selected, true)))
	seed := *fuzzSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("run it again with -fuzz-seed %d", seed)
	streams := e.startStreams(t) // through Services of start
	if *tenantForwarding != "" {
		streams = append(streams, e.startDSRStreams(t)...)
	}
	f := &objectFuzzer{env: e, r: rand.New(rand.NewPCG(seed, 1)), honest: tenantState{allowed: honest, endpoint: "a0"}}
	f.startNodeServers(t)
	e.writeAll(t, "denied.yaml", f.denyPolicy())
	e.file = e.Load(t, f.honestObjects()...)
	if ns := e.file.Scope.Namespace; ns != honestNamespace {
		t.Fatalf("honest tenants have the namespace %s", ns)
	}
	f.tenant = &tenant{r: rand.New(rand.NewPCG(seed, 0)), docs: map[string]string{}, their: f.addresses(t)}
	f.check(t)
	steps := *tenantSteps
	if steps == 0 {
		steps = 12 * longer()
	}
	for step := 0; step < steps && !t.Failed(); step++ {
		t.Run(fmt.Sprint("step ", step), func(t *testing.T) {
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("seed %d; the last changes:\n%s\nthe objects:\n%s", seed,
						strings.Join(f.history[max(0, len(f.history)-60):], "\n"), f.tenant.shortFile())
				}
			})
			f.step(t, step)
		})
	}
	f.checkLog(t)
	e.endStreams(t, streams)
}

// step writes some objects of the tenant, often several times in a row, and changes the honest
// Services. When their change is served, so are the tenant's objects.
func (f *objectFuzzer) step(t *testing.T, step int) {
	for range 1 + f.tenant.r.IntN(3) {
		before := f.tenant.file()
		for range 1 + f.tenant.r.IntN(4) {
			f.note(step, f.tenant.change(), 1)
		}
		for range 1 + f.tenant.r.IntN(3) {
			change, objects := f.tenant.collide()
			f.note(step, change, objects)
		}
		for f.tenant.chance(3) { // some objects come and go
			f.writeAll(t, "tenant.yaml", f.tenant.file())
			f.writeAll(t, "tenant.yaml", before)
		}
		f.writeAll(t, "tenant.yaml", f.tenant.file())
	}
	if step%24 == 7 {
		f.restart(t)
	}
	intruded := f.intrude(t)
	if f.r.IntN(3) == 0 {
		f.file.MustWrite(t, f.honestPods()...) // all Services go, and come again
		f.file.MustWait(t)
	}
	if f.r.IntN(2) == 0 {
		f.honest.endpoint = map[string]string{"a0": "a2", "a2": "a0"}[f.honest.endpoint]
	}
	if f.r.IntN(2) == 0 {
		f.honest.allowed = map[string]string{honest: another, another: honest}[f.honest.allowed]
	}
	f.honest.deleted = f.r.IntN(4) == 0
	f.file.MustWrite(t, f.honestObjects()...)
	f.file.MustWait(t)
	intruded()
	f.visit(t)
	f.check(t)
}

func (f *objectFuzzer) note(step int, change string, objects int) {
	f.history = append(f.history, fmt.Sprintf("step %d: %s", step, change))
	f.objects += objects
}

// intrude has a host that the Service tight never allows ask while objects change, until the
// function it returns has been called.
func (f *objectFuzzer) intrude(t *testing.T) (end func()) {
	var wg sync.WaitGroup
	for _, v := range variants[:2] {
		p, dst := f.MustProbe(t, outsider), f.target(t, flows.LoadBalancer(receiver).Of("tight"), "udp", v)
		wg.Go(func() {
			resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "udp", Dst: dst.String(), Tries: 100, TimeoutMS: 2, PauseMS: 1})
			if err != nil {
				t.Error(err)
			}
			for _, a := range resp.Answers {
				if a.Server == "a0" { // while the Service is deleted, the tenant may have its address
					t.Errorf("%s is outside of the source ranges of %s, and got an answer", outsider, dst)
					return
				}
			}
		})
	}
	return wg.Wait
}

// startNodeServers starts servers at ports that keep a node in the cluster.
func (f *objectFuzzer) startNodeServers(t *testing.T) {
	for _, node := range f.Nodes() {
		_, err := f.MustProbe(t, node+"/host").Do(t.Context(), probe.Request{
			Op: probe.Serve, Server: "kubelet", Listen: []string{fmt.Sprintf("tcp [::]:%d", kubeletPort), fmt.Sprintf("udp [::]:%d", vxlanPort)},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

const kubeletPort, vxlanPort = 10250, 8472

// denied is a pod whose port policedPort a do-not-track policy denies to all but the pod b1.
const denied = "a3"

func (f *objectFuzzer) denyPolicy() []byte {
	return fmt.Appendf(nil, `apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: denied}
spec:
  podSelector: {matchLabels: {pod: %s}}
  deny: others
  ingress:
  - ports: [{port: %d}, {protocol: UDP, port: %[2]d}]
    from: [{ipBlock: {cidr: %s/32}}, {ipBlock: {cidr: "%s/128"}}]
`, denied, policedPort, f.Addr("b1", false), f.Addr("b1", true))
}

// restart kills the agent of a node. The next one knows no earlier state of a file.
func (f *objectFuzzer) restart(t *testing.T) {
	a := f.Agent(receiver)
	if err := a.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := a.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := a.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// honestObjects are older than the tenant's, but for the Service young: nothing but its rank
// gives it its addresses. The Pods are those of all hosts that ask and answer, as in a cluster.
func (f *objectFuzzer) honestObjects() []flows.Object {
	young := flows.Service{Name: "young", Type: corev1.ServiceTypeLoadBalancer, Via: []string{receiver}, Endpoints: flows.On("b0"),
		Age: -2 * 365 * 24 * time.Hour}
	named := flows.Service{Name: "named", Via: []string{receiver}, Endpoints: flows.On("b0")}
	local := flows.Service{Name: "local", Type: corev1.ServiceTypeLoadBalancer, Via: []string{receiver}, ExternalLocal: true,
		Endpoints: flows.On("a0")}
	far := flows.Service{Name: "far", Type: corev1.ServiceTypeLoadBalancer, Via: []string{receiver}, ExternalLocal: true,
		Endpoints: flows.On("b0")}
	closed := flows.Service{Name: "denied", Endpoints: flows.On(denied), Ports: []flows.Port{
		{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: policedPort},
		{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80, Target: policedPort},
	}}
	return slices.Concat(f.honest.objects(), []flows.Object{young, named, local, far, closed}, f.honestPods())
}

func (f *objectFuzzer) honestPods() []flows.Object {
	return []flows.Object{flows.Policy{Pods: []string{selected}}, flows.Pods{"a0", "a1", "a2", denied, "b0", "b1"}}
}

// addresses are those that the tenant may name.
func (f *objectFuzzer) addresses(t *testing.T) (out addresses) {
	for _, v := range variants[:2] {
		at := func(to flows.Target, service string) netip.AddrPort { return f.target(t, to.Of(service), "tcp", v) }
		for _, service := range []string{"tight", "moving", "policed", "old", "named", "local", "denied"} {
			out.clusterIPs = append(out.clusterIPs, at(flows.ClusterIP, service).Addr())
		}
		for _, service := range []string{"moving", "policed", "old"} {
			for _, proto := range []string{"tcp", "udp"} {
				out.nodePorts = append(out.nodePorts, int32(f.target(t, flows.NodePort(receiver).Of(service), proto, v).Port()))
			}
		}
		out.balancers = append(out.balancers, at(flows.LoadBalancer(receiver), "tight").Addr(), at(flows.LoadBalancer(receiver), "local").Addr())
		out.young = append(out.young, at(flows.ClusterIP, "young").Addr(), at(flows.LoadBalancer(receiver), "young").Addr())
		out.external = append(out.external, at(flows.LoadBalancer(receiver), "tight").Addr(), at(flows.LoadBalancer(receiver), "local").Addr(),
			at(flows.ExternalIP(receiver), "named").Addr())
		for _, pod := range []string{"a0", "a1", "a2", denied, selected, "b0", "b1", unnamed} {
			out.pods = append(out.pods, f.addr(pod, v))
		}
		for _, node := range []string{"a", "b", "a/bridge", "b/bridge"} {
			out.nodes = append(out.nodes, f.addr(node, v))
		}
		for _, node := range []string{"a", "b"} {
			out.machines = append(out.machines, f.addr(node, v))
		}
		out.policed = append(out.policed, f.addr(selected, v), f.addr(denied, v))
		out.ranged = append(out.ranged, f.addr(ranged, v))
		out.own = append(out.own, f.addr("a5", v))
		out.clients = append(out.clients, f.addr(outsider, v), f.addr(another, v))
	}
	slices.Sort(out.nodePorts)
	out.nodePorts = slices.Compact(out.nodePorts)
	out.healthPort = int32(f.target(t, flows.HealthCheck(receiver).Of("local"), "tcp", variants[0]).Port())
	return out
}

// honestNamespace has the honest objects: it is the second file of a cluster.
const honestNamespace = "case-002"

// unnamed and ranged are pods that no Pod object names, in the podCIDR of node b. The tenant's
// slices and Pods name unnamed: a slice of its own namespace keeps an externalIP from being served.
const unnamed, ranged = "b2", "b3"

// visit has clients ask at addresses that the tenant may have, so that there are flows of its
// Services.
func (f *objectFuzzer) visit(t *testing.T) {
	g := f.tenant
	var wg sync.WaitGroup
	for range 12 {
		a := one(g, g.their.clusterIPs, g.their.external, g.their.pods, g.their.nodes, []netip.Addr{g.own()})
		dst := netip.AddrPortFrom(a, draw[uint16](g, 80, 443, 8080, 30000, 32600, 32610))
		p, proto := f.MustProbe(t, draw(g, outsider, "a1/vm", "b1")), draw(g, "tcp", "udp")
		wg.Go(func() {
			_, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: proto, Dst: dst.String(), TimeoutMS: 50})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// question is what an honest client asks: server must answer. silent: none does. noAnswer: none
// does, or an error says so.
type question struct {
	from   string
	to     flows.Target
	server string
	proto  string // "": both
}

const silent, noAnswer = "silent", "no answer"

func (f *objectFuzzer) questions() []question {
	s := f.honest
	refused := map[string]string{honest: another, another: honest}[s.allowed]
	tight, moving, policed, young := flows.LoadBalancer(receiver).Of("tight"), flows.NodePort(receiver).Of("moving"),
		flows.NodePort(receiver).Of("policed"), flows.ClusterIP.Of("young")
	all := []question{
		{s.allowed, tight, "a0", ""}, {refused, tight, silent, ""}, {"a1", flows.ClusterIP.Of("tight"), "a0", ""},
		{honest, moving, s.endpoint, ""}, {"b1", moving, s.endpoint, ""}, {honest, flows.NodePort("b").Of("moving"), s.endpoint, ""},
		{"a1", flows.ClusterIP.Of("moving"), s.endpoint, ""}, {"b1/vm", flows.ClusterIP.Of("moving"), s.endpoint, ""},
		{"a", flows.ClusterIP.Of("moving"), s.endpoint, ""},
		{honest, policed, silent, ""}, {"b1", flows.ClusterIP.Of("policed"), silent, ""},
		{"a1", young, "b0", ""}, {"a1/vm", young, "b0", ""}, {honest, young, "b0", ""},
		{honest, flows.LoadBalancer(receiver).Of("young"), "b0", ""},
		{honest, flows.ExternalIP(receiver).Of("named"), "b0", ""}, {"a1/vm", flows.ClusterIP.Of("named"), "b0", ""},
		{honest, flows.LoadBalancer(receiver).Of("local"), "a0", ""}, {honest, flows.HealthCheck(receiver).Of("local"), "200", "http"},
		// Its endpoint is on another node, in whose podCIDR it is.
		{honest, flows.LoadBalancer(receiver).Of("far"), silent, ""}, {honest, flows.HealthCheck(receiver).Of("far"), "503", "http"},
		// Pods' own addresses.
		{"a1/vm", flows.Address("b0", endpointUp), "b0", ""}, {"b1", flows.Address("a0", endpointUp), "a0", ""},
		{"a1", flows.Address(unnamed, endpointUp), unnamed, ""}, {"a1", flows.Address(ranged, endpointUp), ranged, ""},
		{"b1", flows.Address(ranged, endpointUp), ranged, ""},
		{"b1/vm", flows.Address("a2", endpointUp), "a2", ""}, {"b1", flows.Address(selected, endpointUp), silent, ""},
		{"b1", flows.Address(denied, policedPort), denied + ":8090", ""}, {"b0", flows.Address(denied, policedPort), silent, ""},
		// Nodes' own ports.
		{honest, flows.Address(receiver, kubeletPort), "kubelet", "tcp"}, {"b", flows.Address(receiver, kubeletPort), "kubelet", "tcp"},
		{"b", flows.Address(receiver, vxlanPort), "kubelet", "udp"},
		// Load balancers ask for the node's health from outside. The agent has nothing at the probe's path.
		{honest, flows.Address(receiver, 10256), "404", "http"},
	}
	for _, from := range []string{"b0", "a1/vm", honest} {
		all = append(all, question{from, flows.Target{Kind: aroundKind}, noAnswer, ""})
	}
	if !s.deleted {
		all = append(all, question{honest, flows.NodePort(receiver).Of("old"), "a0", ""}, question{"a1/vm", flows.ClusterIP.Of("old"), "a0", ""})
	}
	return all
}

// answerWithin ends a question that has no answer.
const answerWithin = 20 * time.Second

// aroundKind is the kind of the tenant's Service that leads to pods with a policy.
const aroundKind flows.TargetKind = "a way around policies"

// ask asks a question. A client has a new port each time: flows of an earlier question may stay open.
func (f *objectFuzzer) ask(t *testing.T, q question, proto, dst string) {
	req := probe.Request{Op: probe.Try, Proto: proto, Dst: dst, TimeoutMS: int(answerWithin / time.Millisecond),
		LowPorts: cluster.ParseName(q.from).IsClient(), FreshPorts: cluster.ParseName(q.from).IsClient()}
	if q.server == silent || q.server == noAnswer {
		req.TimeoutMS = 300
	}
	p, err := f.Probe(q.from)
	if err != nil {
		t.Error(err)
		return
	}
	resp, err := p.Do(t.Context(), req)
	if err != nil {
		t.Error(err)
		return
	}
	a := resp.Answers[0]
	got := a.Server
	switch {
	case a.Err == probe.Timeout && q.server != noAnswer:
		got = silent
	case a.Err != probe.OK:
		got = noAnswer
	}
	if got == q.server || a.Err != probe.OK && q.server == noAnswer {
		return
	}
	again, err := p.Do(t.Context(), req) // does it last?
	t.Errorf("%s from %s to %s (%s): %+v, want %q; asked again: %+v %v", proto, q.from, q.to, dst, a, q.server, again.Answers, err)
}

// check asks all questions by both protocols and families, and the agents whether they are
// healthy.
func (f *objectFuzzer) check(t *testing.T) {
	t.Helper()
	var wg sync.WaitGroup
	for _, q := range f.questions() {
		for i, v := range variants[:2] {
			if q.proto == "http" && v.v6 {
				continue
			}
			protos := []string{"tcp", "udp"}
			if q.proto != "" {
				protos = []string{q.proto}
			}
			for _, proto := range protos {
				dst := netip.AddrPortFrom(aroundIPs[i], uint16(servicePort[0]))
				if q.to.Kind != aroundKind {
					dst = f.target(t, q.to, strings.Replace(proto, "http", "tcp", 1), v)
				}
				wg.Go(func() { f.ask(t, q, proto, dst.String()) })
			}
		}
	}
	wg.Wait()
	for _, node := range f.Nodes() {
		_, err := agent.Get(t.Context(), f.MustHost(t, node), agent.HealthPort, "/healthz")
		if err == nil {
			err = f.Agent(node).Ended()
		}
		if err != nil {
			t.Errorf("agent on %s: %v", node, err)
		}
	}
}

// linesOfAnObject is how many lines an agent may log for one object that was written: each of its
// problems when it begins and when it ends.
const linesOfAnObject = 36

// checkLog wants that the log has no more lines than problems, and that a lasting problem adds none.
func (f *objectFuzzer) checkLog(t *testing.T) {
	for _, node := range f.Nodes() {
		if lines := f.logLines(t, node); lines > f.objects*linesOfAnObject {
			t.Errorf("the agent on %s logged %d lines for %d objects; the last:\n%s", node, lines, f.objects, f.Agent(node).Tail())
		}
	}
	before := f.logLines(t, receiver)
	const changes = 4
	for range changes {
		f.file.MustWrite(t, f.honestObjects()...)
		f.file.MustWait(t)
	}
	if more := f.logLines(t, receiver) - before; more > changes {
		t.Errorf("the agent logged %d lines, while only the canary changed; the last:\n%s", more, f.Agent(receiver).Tail())
	}
}

func (f *objectFuzzer) logLines(t *testing.T, node string) int {
	text, err := os.ReadFile(f.Agent(node).Log)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(text, []byte("\n"))
}

// servingStream is a series of requests that one server answers.
type servingStream struct {
	from, name, server string
}

// startStreams starts series of requests over one connection and over new ones, to Services that
// do not change.
func (e *env) startStreams(t *testing.T) (all []servingStream) {
	for _, v := range variants {
		for _, proto := range []string{"tcp", "udp", "new-tcp", "new-udp"} {
			for from, to := range map[string]flows.Target{honest: flows.NodePort(receiver), "a1": flows.ClusterIP, "b1/vm": flows.ClusterIP} {
				all = append(all, e.startStream(t, from, to.Of(v.place), proto, v))
			}
		}
	}
	return all
}

func (e *env) startStream(t *testing.T, from string, to flows.Target, proto string, v variant) servingStream {
	s := servingStream{from, fmt.Sprint(proto, " from ", from, " to ", v, " by ", to), v.endpoint()}
	dst := e.target(t, to, strings.TrimPrefix(proto, "new-"), v)
	_, err := e.MustProbe(t, from).Do(t.Context(), probe.Request{
		Op: probe.Stream, Name: s.name, Proto: proto, Dst: dst.String(), PauseMS: 250, TimeoutMS: int(answerWithin / time.Millisecond),
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// startDSRStreams starts series of requests through a Service with DSR.
func (e *env) startDSRStreams(t *testing.T) (all []servingStream) {
	before := e.file
	defer func() { e.file = before }()
	e.file = e.Load(t, flows.Service{
		Name: "direct", Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("b0"),
		Annotations: map[string]string{intent.BalanceAnnotation: "maglev"},
	})
	for _, v := range dsrVariants {
		for _, proto := range []string{"tcp", "udp"} {
			all = append(all, e.startStream(t, honest, flows.NodePort(receiver).Of("direct"), proto, v))
		}
	}
	return all
}

// endStreams fails unless each request was answered, by the right server.
func (e *env) endStreams(t *testing.T, all []servingStream) {
	for _, s := range all {
		resp, err := e.MustProbe(t, s.from).Do(t.Context(), probe.Request{Op: probe.Stop, Name: s.name})
		if err != nil {
			t.Error(err)
			continue
		}
		r := resp.Report
		if r.Answered != r.Sent || r.Servers[s.server] != r.Answered {
			t.Errorf("%s: %d of %d requests were answered, by %v, want %s; lost: %q", s.name, r.Answered, r.Sent, r.Servers, s.server, r.Lost)
		}
	}
}
