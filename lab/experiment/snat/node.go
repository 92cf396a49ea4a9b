package snat

import (
	"context"
	"fmt"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// protocol is the transport of a kind of load.
func protocol(kind load.Kind) corev1.Protocol {
	if kind == load.DNS || kind == load.UDP {
		return corev1.ProtocolUDP
	}
	return corev1.ProtocolTCP
}

// loadRules makes the node translate as kube-proxy's rules do for a NodePort, with
// another method to choose ports.
func loadRules(ctx context.Context, r *harness.Harness, m method, t traffic) error {
	node, pod := r.Cluster.Node(0), r.Cluster.Pod(1, 0)
	rules := natRules(strings.ToLower(string(protocol(t.kind))), node.IPv4.String(), pod.IPv4.String(), m.flags, t.ports)
	return restore(ctx, node, rules)
}

func natRules(protocol, node, pod, flags string, ports int) string {
	if ports > 0 {
		flags = fmt.Sprintf("--to-ports %d-%d %s", firstPort, firstPort+ports-1, flags)
	}
	return fmt.Sprintf(`*nat
-A PREROUTING -p %[1]s -d %[2]s --dport %[3]d -j DNAT --to-destination %[4]s:%[5]d
-A POSTROUTING -p %[1]s -d %[4]s --dport %[5]d -j MASQUERADE %[6]s
COMMIT
`, protocol, node, nodePort, pod, podPort, strings.TrimSpace(flags))
}

// fewPorts limits the ports that a node may use for SNAT. For MASQUERADE a rule sets
// them; Spillway uses the ports that are neither local nor reserved.
func fewPorts(node *topology.Host, m method, ports int) error {
	if ports == 0 || m.mode == "" {
		return nil
	}
	values := map[string]string{
		"ip_local_port_range":     fmt.Sprintf("%d %d", 32768, firstPort-1),
		"ip_local_reserved_ports": fmt.Sprintf("1-32767,%d-65535", firstPort+ports),
	}
	return node.Do(func() error {
		for name, value := range values {
			if err := os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0o644); err != nil {
				return fmt.Errorf("set %s of %s: %w", name, node.Name, err)
			}
		}
		return nil
	})
}

// startAgents starts an agent on each node.
func startAgents(ctx context.Context, r *harness.Harness, mode string, kind load.Kind) error {
	dir, err := writeManifests(r, kind)
	if err != nil {
		return err
	}
	for i := range r.Cluster.Spec.Nodes {
		if err := r.Agent(ctx, r.Cluster.Node(i), dir, mode); err != nil {
			return err
		}
	}
	return nil
}

// writeManifests writes a Service whose endpoint is the pod of node1.
func writeManifests(r *harness.Harness, kind load.Kind) (dir string, err error) {
	c := r.Cluster
	nodes, err := c.NodesYAML()
	if err != nil {
		return "", err
	}
	proto, port, unnamed, ready := protocol(kind), int32(podPort), "", true
	meta := metav1.ObjectMeta{Namespace: "lab", Name: "snat"}
	service := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: meta,
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Protocol: proto, Port: port, NodePort: nodePort}}},
	}
	meta.Labels = map[string]string{discoveryv1.LabelServiceName: "snat"}
	slice := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  meta,
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &unnamed, Port: &port, Protocol: &proto}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{c.Pod(1, 0).IPv4.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}, NodeName: &c.Pod(1, 0).Node}},
	}
	text := string(nodes)
	for _, o := range []any{service, slice} {
		one, err := yaml.Marshal(o)
		if err != nil {
			return "", fmt.Errorf("write manifest: %w", err)
		}
		text += "---\n" + string(one)
	}
	_, err = r.WriteFile("manifests/snat.yaml", []byte(text))
	return r.Path("manifests"), err
}
