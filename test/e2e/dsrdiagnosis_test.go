package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/trace"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/must"
)

// listedFlow is what `spillway flows -o json` prints of a flow.
type listedFlow struct {
	DSR, OneWay bool
	Protocol    string
	Endpoint    struct{ Address string }
}

// showDirect wants the commands to show DSR replies of a Service that clients have asked.
func (e *env) showDirect(t *testing.T, s *suite.File) {
	name := e.nameOfService(s)
	for _, node := range []string{"a", "b"} {
		var list struct{ Flows []listedFlow }
		if err := json.Unmarshal([]byte(e.spillway(t, node, "flows", "--service", name, "-o", "json")), &list); err != nil {
			t.Fatal(err)
		}
		direct := 0
		for _, f := range list.Flows {
			tcp := f.Protocol == "tcp"
			if f.DSR != tcp || f.OneWay != (tcp && node == "a") {
				t.Errorf("node %s shows %+v", node, f)
			}
			if f.DSR {
				direct++
			}
		}
		if direct == 0 {
			t.Errorf("node %s shows no DSR flow among %d", node, len(list.Flows))
		}
		if text := e.spillway(t, node, "services", name); !strings.Contains(oneLine(text), "Forwarding direct: ") {
			t.Errorf("node %s: %s", node, text)
		}
	}
	r := e.trace(t, "client0", s.MustAddress(t, flows.LoadBalancer("a"), flows.TCP4))
	if r.Refused || !strings.Contains(r.Decision, "no reply passes this node") || !slices.Contains(r.Verdicts, "dsr_announced") {
		t.Errorf("trace: %+v", r)
	}
}

// strictTunnel has a NetworkPolicy send a pod's packets through the stack of node b, whose tunnel
// filters by the reverse path. Clients must be served, and both nodes must say what is wrong.
func (e *env) strictTunnel(t *testing.T) {
	e.writeAll(t, "direct-pods.yaml", e.podsYAML(policyPods{"b1": "cache"})+`---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: all, namespace: caches}
spec: {podSelector: {}, policyTypes: [Ingress], ingress: [{}]}
`)
	defer e.writeAll(t, "direct-pods.yaml", "")
	defer e.Output(t, "b", "sysctl", "-w", "net.ipv4.conf.flannel/1.rp_filter=0")
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: flows.On("b1"),
		Annotations: map[string]string{intent.BalanceAnnotation: "maglev"}})
	dst := s.MustAddress(t, flows.LoadBalancer("a"), flows.TCP4)
	client := e.MustProbe(t, "client0")
	ask := func(port int) {
		resp, err := client.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", Dst: dst, LocalPort: port, TimeoutMS: 5000})
		must.Do(t, err)
		if a := resp.Answers[0]; a.Err != "" {
			t.Errorf("port %d: %+v", port, a)
		}
	}
	e.Output(t, "b", "sysctl", "-w", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.flannel/1.rp_filter=2")
	ask(30000)
	before := e.doctor(t, "b") + e.doctor(t, "a")
	if strings.Contains(before, "rp-filter-strict") || strings.Contains(before, "dsr-replies-missing") {
		t.Errorf("with a loose filter: %s", before)
	}
	e.Output(t, "b", "sysctl", "-w", "net.ipv4.conf.flannel/1.rp_filter=1")
	port := 30000
	await.NoError(t, func() error { // an answer is remembered for 10 s
		port++
		ask(port)
		if text := e.doctor(t, "b"); !strings.Contains(text, "rp-filter-strict") || !strings.Contains(text, "pod caches/b1") ||
			!strings.Contains(text, "flannel.1") {
			return fmt.Errorf("the endpoint's node: %s", text)
		}
		return nil
	})
	await.NoError(t, func() error { // some missing replies may have other reasons
		port++
		ask(port)
		if text := e.doctor(t, "a"); !strings.Contains(text, "dsr-replies-missing") || !strings.Contains(text, "pod caches/b1") {
			return fmt.Errorf("the receiving node: %s", text)
		}
		return nil
	})
	r := e.trace(t, "client0", dst)
	if nat := step(r, "source NAT"); nat.State != trace.Doubt || !strings.Contains(nat.Follows, "DSR replies of this endpoint do not arrive") {
		t.Errorf("trace: %+v", r)
	}
}

// doctor is what doctor prints on a node, with its agent.
func (e *env) doctor(t *testing.T, node string) string {
	t.Helper()
	out, _ := e.MustHost(t, node).Command(t.Context(), e.Binary, "doctor", "--netns", "here", "--sample", "0", "-o", "json", "--api-socket",
		e.Agent(node).Socket()).CombinedOutput()
	return string(out)
}
