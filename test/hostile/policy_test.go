package hostile

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
)

var policyScenarios = []scenario{
	{name: "A selected pod forges its source", run: forgedSource},
	{name: "A pod without podIPs in a namespace with a policy", run: startingPod},
}

// selected is the pod that NetworkPolicies select; what enforces them is a rule
// in the forward chain of its node, as a CNI would load it.
const selected = "a4"

// forgedSource: a pod whose NetworkPolicy denies it all traffic gets around the
// rule that enforces the policy with none of the addresses that it may forge.
func forgedSource(t *testing.T, e *env, v variant) {
	e.loadPolicy(t, flows.Policy{Pods: []string{selected}})
	mac, _, err := e.device(selected, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	e.enforce(t, "ether saddr "+mac.String()+" drop")
	arrived := e.capture(t, v.endpoint(), func(p packet) bool { return marked("forged")(p) || marked("allowed")(p) })
	attacker := e.sender(t, selected)
	for _, host := range []string{selected, "a2", "a", "a/bridge", "b", "b1", honest, ""} {
		src := stranger(v, 0)
		if host != "" {
			src = netip.AddrPortFrom(e.addr(host, v), 20000)
		}
		for _, dst := range []netip.AddrPort{e.backend(v, endpointUp), e.target(t, flows.ClusterIP.Of(v.place), "udp", v)} {
			attacker.send(t, packet{src: src, dst: dst, proto: "udp", payload: fmt.Appendf(nil, "forged: %s to %s", host, dst)})
		}
	}
	for _, p := range arrived.settled() {
		t.Errorf("the endpoint received a packet that the policy denies: %s", p.payload)
	}
	allowed := packet{src: netip.AddrPortFrom(e.addr("a2", v), 20000), dst: e.backend(v, endpointUp), proto: "udp", payload: []byte("allowed")}
	before := len(arrived.packets())
	e.sender(t, "a2").send(t, allowed)
	if len(arrived.wait(before+1)) == before {
		t.Error("the endpoint did not receive the packet of a pod that no policy selects")
	}
}

// loadPolicy loads objects until the test ends. The endpoint a0 of the canary in
// their namespace is a Pod there, lest it count as one that a policy may select.
func (e *env) loadPolicy(t *testing.T, objects ...flows.Object) {
	t.Helper()
	file := e.NewFile()
	if err := errors.Join(file.Write(append(objects, flows.Pods{"a0"})), file.Wait(t.Context())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := file.Remove(); err != nil {
			t.Error(err)
		}
	})
}

// enforce puts a rule into the forward chain of the receiving node until the test
// ends, as a CNI does for a NetworkPolicy.
func (e *env) enforce(t *testing.T, rule string) {
	t.Helper()
	host, err := e.Host(receiver)
	if err != nil {
		t.Fatal(err)
	}
	cmd := host.Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader("table inet hostile {\nchain forward {\ntype filter hook forward priority filter; policy accept;\n" + rule +
		"\n}\n}\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("load nftables rule: %v: %s", err, out)
	}
	t.Cleanup(func() { e.Output(t, receiver, "nft", "delete", "table", "inet", "hostile") })
}

// policedService is a Service on a port that only these cases use.
func policedService(endpoint flows.Endpoint) flows.Object {
	return flows.Service{
		Type: corev1.ServiceTypeNodePort, Endpoints: []flows.Endpoint{endpoint},
		Ports: []flows.Port{
			{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: 8090},
			{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80, Target: 8090},
		},
	}
}

// policyCases are objects that describe a selected pod badly. Its policy holds
// nevertheless.
func policyCases() []flows.Case {
	toSelected := map[string][]string{"a": {
		"ip daddr ${a4} meta l4proto { tcp, udp } th dport 8090 drop",
		"ip6 daddr ${a4.6} meta l4proto { tcp, udp } th dport 8090 drop",
	}}
	denied := []flows.Flow{
		{From: "client0", To: flows.NodePort("a"), Want: flows.Drop},
		{From: "client0", To: flows.NodePort("b"), Want: flows.Drop},
		{From: "a2/vm", To: flows.ClusterIP, Want: flows.Drop},
		{From: "b1", To: flows.ClusterIP, Want: flows.Drop},
	}
	return []flows.Case{
		{
			Name:    "An EndpointSlice without a nodeName leads to a selected pod",
			Objects: []flows.Object{policedService(flows.Endpoint{On: selected, NoNode: true}), flows.Policy{Pods: []string{selected}}},
			Rules:   toSelected, Flows: denied,
		},
		{
			Name:    "An EndpointSlice with another node's name leads to a selected pod",
			Objects: []flows.Object{policedService(flows.Endpoint{On: selected, ClaimNode: "b"}), flows.Policy{Pods: []string{selected}}},
			Rules:   toSelected, Flows: denied,
		},
	}
}

// starting is a pod that no other case tells the agent about.
const starting = "a5"

// startingPod: a pod whose object has no podIPs yet, in a namespace with a policy
// for all its pods.
func startingPod(t *testing.T, e *env, v variant) {
	e.loadPolicy(t, flows.StartingPods{starting})
	e.enforce(t, fmt.Sprintf("%s saddr %s meta l4proto { tcp, udp } th dport %d drop", family(v), e.addr(starting, v), endpointUp))
	service := map[string]string{"here": "beside", "elsewhere": "elsewhere"}[v.place]
	var wg sync.WaitGroup
	for _, from := range []string{starting, starting + "/vm"} {
		for _, proto := range []string{"tcp", "udp"} {
			dst := e.target(t, flows.ClusterIP.Of(service), proto, v)
			wg.Go(func() { e.wantSilence(t, from, proto, dst) })
		}
	}
	wg.Wait()
}

// wantSilence asks from a host and fails unless no answer comes.
func (e *env) wantSilence(t *testing.T, from, proto string, dst netip.AddrPort) {
	p, err := e.Probe(from)
	if err != nil {
		t.Error(err)
		return
	}
	resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: proto, Dst: dst.String(), TimeoutMS: 600})
	if err != nil {
		t.Error(err)
		return
	}
	if a := resp.Answers[0]; a.Err != probe.Timeout {
		t.Errorf("%s from %s: answer %+v, want silence", proto, from, a)
	}
}

func family(v variant) string {
	if v.v6 {
		return "ip6"
	}
	return "ip"
}

// playCases runs cases, which need no packets of an attacker.
func (e *env) playCases(t *testing.T, name string, cases []flows.Case) {
	t.Run(name, func(t *testing.T) {
		s := &suite.Suite{Cluster: e.Cluster, Loader: e.Loader}
		s.Run(t, cases)
	})
}
