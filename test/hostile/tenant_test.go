package hostile

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
)

// another is a client beside honest.
const another = "client2"

// tenantState is what honest tenants have in the namespace of the test's file.
type tenantState struct {
	allowed  string // the only host that may use the Service tight
	endpoint string // of the Service moving
	deleted  bool   // the Service old
	policy   bool   // a NetworkPolicy selects the endpoint of the Service policed
}

func (s tenantState) objects() []flows.Object {
	service := func(name, endpoint string) flows.Service {
		return flows.Service{Name: name, Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(endpoint)}
	}
	tight := service("tight", "a0")
	tight.Type, tight.Via, tight.AllowFrom = corev1.ServiceTypeLoadBalancer, []string{receiver}, []string{s.allowed}
	all := []flows.Object{tight, service("moving", s.endpoint), service("policed", selected)}
	if !s.deleted {
		all = append(all, service("old", "a0"))
	}
	if s.policy {
		all = append(all, flows.Policy{Pods: []string{selected}}, flows.Pods{"a0"})
	}
	return all
}

// TestATenantFillsTheNode: the Services of one namespace ask for all source ranges that a node has
// room for. Others' Services change, are restricted and deleted meanwhile, a Node and a
// NetworkPolicy come, and the agent is killed. When the objects are gone, there is room again.
func TestATenantFillsTheNode(t *testing.T) {
	e := start(t, "hostile-tenant")
	before := tenantState{allowed: honest, endpoint: "a0"}
	e.file = e.Load(t, before.objects()...)
	e.wantTenants(t, "before", before)
	e.enforce(t, fmt.Sprintf("ip daddr %s drop\nip6 daddr %s drop", e.Addr(selected, false), e.Addr(selected, true)))

	e.writeAll(t, "greedy.yaml", e.greedyObjects(greedyServices))
	e.waitGreedy(t)
	e.writeAll(t, "node.yaml", []byte(anotherNode))
	changed := tenantState{allowed: another, endpoint: "a2", deleted: true, policy: true}
	e.changeTenants(t, "while the node is full", changed)

	agent := e.Agent(receiver)
	if err := agent.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := agent.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := agent.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	changed.endpoint = "a0"
	e.changeTenants(t, "after the agent was killed", changed)

	e.writeAll(t, "greedy.yaml", nil)
	changed.allowed, changed.endpoint, changed.deleted = honest, "a2", false
	e.changeTenants(t, "when the node has room", changed)
	e.writeAll(t, "greedy.yaml", e.greedyObjects(1))
	e.waitGreedy(t)
}

// changeTenants writes a state, waits for it, and compares.
func (e *env) changeTenants(t *testing.T, when string, s tenantState) {
	t.Helper()
	e.file.MustWrite(t, s.objects()...)
	e.file.MustWait(t)
	e.wantTenants(t, when, s)
}

// wantTenants fails unless the Services are those of a state.
func (e *env) wantTenants(t *testing.T, when string, s tenantState) {
	t.Helper()
	for _, v := range variants[:2] {
		tight := e.target(t, flows.LoadBalancer(receiver).Of("tight"), "tcp", v)
		refused := map[string]string{honest: another, another: honest}[s.allowed]
		if c, err := e.connect(s.allowed, v, tight); err != nil {
			t.Errorf("%s, %s: %s may use the restricted Service: %v", when, v, s.allowed, err)
		} else {
			c.Close()
		}
		e.wantSilence(t, refused, "tcp", tight)
		if server := e.serverOf(t, e.nodePort(t, "moving", "tcp", v)); server != s.endpoint {
			t.Errorf("%s, %s: %q answers for a Service whose endpoint is %s", when, v, server, s.endpoint)
		}
		if !s.deleted {
			if server := e.serverOf(t, e.nodePort(t, "old", "tcp", v)); server != "a0" {
				t.Errorf("%s, %s: %q answers for a Service with the endpoint a0", when, v, server)
			}
		}
		policed := e.nodePort(t, "policed", "tcp", v)
		if s.policy {
			e.wantSilence(t, honest, "tcp", policed)
		} else if server := e.serverOf(t, policed); server != selected {
			t.Errorf("%s, %s: %q answers, want %s", when, v, server, selected)
		}
	}
}

// serverOf asks as an honest client who answers; "" without an answer.
func (e *env) serverOf(t *testing.T, dst netip.AddrPort) (server string) {
	t.Helper()
	host, err := e.Host(honest)
	if err != nil {
		t.Fatal(err)
	}
	err = host.Do(func() (err error) {
		server, err = answering(0, dst)
		return err
	})
	if err != nil {
		t.Log(err)
	}
	return server
}

// writeAll writes a file of manifests for the agents of all nodes; nil deletes it.
func (e *env) writeAll(t *testing.T, name string, text []byte) {
	t.Helper()
	for _, node := range e.Nodes() {
		if err := e.Agent(node).Write(name, text); err != nil {
			t.Fatal(err)
		}
	}
}

// The greedy namespace: each Service but the oldest and the youngest has 65,536 ports times ranges,
// as many as one may have, in 256 ports and 128 ranges of each family. The ports of the youngest have
// a range each, for the room that is left.
const (
	greedyServices = 7
	greedyPorts    = 256
	greedyRanges   = 128
)

// greedyIP is the address of the oldest Service of the namespace, which asks for little.
func greedyIP(v6 bool, i int) string {
	if v6 {
		return fmt.Sprintf("fd00:96::dead:%x", i+1)
	}
	return fmt.Sprintf("10.96.222.%d", i+1)
}

// greedyObjects are the Services and EndpointSlices of one namespace.
func (e *env) greedyObjects(services int) []byte {
	var b bytes.Buffer
	for i := range services {
		ports, ranges := greedyPorts, greedyRanges
		switch i {
		case 0:
			ports, ranges = 1, 1
		case greedyServices - 1:
			ranges = 1
		}
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Service\nmetadata: {namespace: greedy, name: s%d, creationTimestamp: "+
			"\"2020-01-0%dT00:00:00Z\"}\n", i, i+1)
		fmt.Fprintf(&b, "spec:\n  type: LoadBalancer\n  clusterIP: %s\n  clusterIPs: [%[1]s, %q]\n  ipFamilies: [IPv4, IPv6]\n  "+
			"ipFamilyPolicy: RequireDualStack\n  loadBalancerSourceRanges:\n", greedyIP(false, i), greedyIP(true, i))
		for r := range ranges {
			fmt.Fprintf(&b, "  - 203.%d.113.0/24\n  - 2001:db8:%x::/48\n", r, r)
		}
		fmt.Fprint(&b, "  ports:\n")
		for p := range ports {
			fmt.Fprintf(&b, "  - {name: p%d, protocol: TCP, port: %d, targetPort: %d}\n", p, 80+p, endpointUp)
		}
		fmt.Fprintf(&b, "status: {loadBalancer: {ingress: [{ip: 192.0.2.%d}, {ip: \"2001:db8:ffff::%x\"}]}}\n", 100+i, i+1)
		for _, v6 := range []bool{false, true} {
			family := map[bool]string{false: "IPv4", true: "IPv6"}[v6]
			fmt.Fprintf(&b, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {namespace: greedy, name: s%d-%s, labels: "+
				"{kubernetes.io/service-name: s%[1]d}}\naddressType: %[3]s\n", i, strings.ToLower(family), family)
			fmt.Fprintf(&b, "endpoints: [{addresses: [%q], conditions: {ready: true}}]\nports:\n", e.Addr("b0", v6))
			for p := range ports {
				fmt.Fprintf(&b, "- {name: p%d, protocol: TCP, port: %d}\n", p, endpointUp)
			}
		}
	}
	return b.Bytes()
}

// waitGreedy waits until the nodes serve the oldest Service of the namespace: then they know all
// others, which are in the same file.
func (e *env) waitGreedy(t *testing.T) {
	t.Helper()
	for _, node := range e.Nodes() {
		p := e.MustProbe(t, node)
		for _, v6 := range []bool{false, true} {
			at := netip.AddrPortFrom(netip.MustParseAddr(greedyIP(v6, 0)), 80).String()
			await.NoError(t, func() error {
				resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", Dst: at, TimeoutMS: 1000})
				if err == nil && resp.Answers[0].Err != probe.OK {
					err = fmt.Errorf("%s: the oldest Service: %v; the agent's log ends with:\n%s", node, resp.Answers[0], e.Agent(node).Tail())
				}
				return err
			})
		}
	}
}

// anotherNode has addresses and ranges that protect.
const anotherNode = `apiVersion: v1
kind: Node
metadata: {name: another}
spec: {podCIDRs: [10.250.0.0/24, "fd00:250::/64"]}
status: {addresses: [{type: InternalIP, address: 203.0.113.250}, {type: InternalIP, address: "2001:db8::250"}]}
`

// TestATenantOpensNoPortOfANode: a policy denies clients a port of a node. A Service of another
// namespace names that address and port in externalIPs. It is not served there, and the policy
// holds nevertheless.
func TestATenantOpensNoPortOfANode(t *testing.T) {
	e := start(t, "hostile-open")
	var server net.Listener
	e.Do(t, receiver, func() (err error) {
		server, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", ":10250")
		return err
	})
	defer server.Close()
	e.writeAll(t, "policy.yaml", []byte(`apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: kubelet}
spec:
  nodeSelector: {matchExpressions: [{key: topology.kubernetes.io/zone, operator: Exists}]}
  deny: others
  ingress: [{ports: [{protocol: TCP, port: 10250}], from: [{ipBlock: {cidr: 192.0.2.77/32}}]}]
`))
	for _, v := range variants[:2] {
		dst := netip.AddrPortFrom(e.addr(receiver, v), 10250)
		await.True(t, "the policy denies clients the port", func() bool { return e.reaches(t, honest, dst) != nil })
		e.writeAll(t, "tenant.yaml", fmt.Appendf(nil, `apiVersion: v1
kind: Service
metadata: {namespace: tenant, name: s}
spec: {clusterIP: %q, externalIPs: [%q], ports: [{protocol: TCP, port: 10250}]}
`, greedyIP(v.v6, 0), dst.Addr()))
		await.True(t, "the node has the Service", func() bool { return strings.Contains(e.status(t), dst.String()) })
		if e.reaches(t, honest, dst) == nil {
			t.Errorf("%s: a client reaches %s, which the policy denies", v, dst)
		}
	}
}

// TestATenantLiftsNoDenial: a policy denies a pod all servers but one. A slice of another
// namespace names that one, so that netfilter may translate there, and its Service leads to others.
func TestATenantLiftsNoDenial(t *testing.T) {
	e := start(t, "hostile-lift")
	e.Load(t, flows.Pods{"a1", "b0", "b1"})
	policy := "apiVersion: policy.spillway.dev/v1alpha1\nkind: DoNotTrackPolicy\nmetadata: {name: asking}\n" +
		"spec:\n  podSelector: {matchLabels: {pod: a1}}\n  deny: others\n  egress:\n"
	tenant := ""
	for i, v := range variants[:2] {
		policy += fmt.Sprintf("  - {ports: [{port: %d}], to: [{ipBlock: {cidr: %q}}]}\n", endpointUp,
			netip.PrefixFrom(e.addr("b1", v), e.addr("b1", v).BitLen()))
		tenant += fmt.Sprintf(`---
apiVersion: v1
kind: Service
metadata: {namespace: tenant, name: s%d, annotations: {spillway.dev/helper: ftp}}
spec: {clusterIP: %q, ports: [{name: p, protocol: TCP, port: %d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: tenant, name: s%[1]d, labels: {kubernetes.io/service-name: s%[1]d}}
addressType: %[4]s
endpoints: [{addresses: [%q], conditions: {ready: false}}, {addresses: [%q]}]
ports: [{name: p, protocol: TCP, port: %[3]d}]
`, i, greedyIP(v.v6, i), endpointUp, map[bool]string{false: "IPv4", true: "IPv6"}[v.v6], e.addr("b1", v), e.addr("b0", v))
	}
	check := func(when string) {
		t.Helper()
		for i, v := range variants[:2] {
			at := func(host string) netip.AddrPort { return netip.AddrPortFrom(e.addr(host, v), endpointUp) }
			await.NoError(t, func() error { return e.reaches(t, "a1", at("b1")) })
			for _, dst := range []netip.AddrPort{at("b0"), netip.AddrPortFrom(netip.MustParseAddr(greedyIP(v.v6, i)), endpointUp)} {
				if e.reaches(t, "a1", dst) == nil {
					t.Errorf("%s, %s: the pod reaches %s, which leads to what the policy denies it", v, when, dst)
				}
			}
		}
	}
	e.writeAll(t, "policy.yaml", []byte(policy))
	for _, v := range variants[:2] {
		await.True(t, "the policy denies", func() bool { return e.reaches(t, "a1", netip.AddrPortFrom(e.addr("b0", v), endpointUp)) != nil })
	}
	check("without a tenant")
	e.writeAll(t, "tenant.yaml", []byte(tenant))
	for i, v := range variants[:2] {
		at := netip.AddrPortFrom(netip.MustParseAddr(greedyIP(v.v6, i)), endpointUp)
		await.NoError(t, func() error { return e.reaches(t, "a2", at) })
	}
	check("with a tenant")
}

// reaches returns why a host cannot connect.
func (e *env) reaches(t *testing.T, from string, dst netip.AddrPort) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	conn, err := e.MustHost(t, from).Dial(ctx, "tcp", dst.String())
	if err == nil {
		conn.Close()
	}
	return err
}
