package overlay

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// proxy is the program that serves the NodePort.
type proxy struct {
	name string
	mode string
	peer bool
}

var proxies = []proxy{
	{"kube-proxy, iptables", "iptables", true},
	{"kube-proxy, nftables", "nftables", true},
	{"Spillway, eBPF", "ebpf", false},
	{"Spillway, nftables", "nftables", false},
	{"Spillway, iptables", "iptables", false},
}

// service is the exchange's.
func service() *corev1.Service {
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "rtb", Name: "exchange"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: podPort, NodePort: nodePort}}},
	}
}

func slice(pod *topology.Host) *discoveryv1.EndpointSlice {
	name, port, protocol, ready := "http", int32(podPort), corev1.ProtocolTCP, true
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "rtb", Name: "exchange-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: "exchange"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{pod.IPv4.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}, NodeName: &pod.Node}},
	}
}

// startProxies starts a proxy on the client's node and on the exchange's; Service packets
// use no other node.
func startProxies(ctx context.Context, r *harness.Harness, p proxy) error {
	c := r.Cluster
	nodes := []*topology.Host{c.Node(0), c.Node(1)}
	if p.peer {
		if _, err := r.API(ctx, c.Client(1), service(), slice(c.Pod(1, 0))); err != nil {
			return err
		}
		for _, node := range nodes {
			if err := r.KubeProxy(ctx, node, p.mode, 0); err != nil {
				return err
			}
		}
		return nil
	}
	text, err := c.NodesYAML()
	if err != nil {
		return err
	}
	for _, o := range []any{service(), slice(c.Pod(1, 0))} {
		one, err := yaml.Marshal(o)
		if err != nil {
			return fmt.Errorf("write manifest: %w", err)
		}
		text = append(append(text, "---\n"...), one...)
	}
	if _, err := r.WriteFile("manifests/rtb.yaml", text); err != nil {
		return err
	}
	for _, node := range nodes {
		if err := r.Agent(ctx, node, r.Path("manifests"), p.mode); err != nil {
			return err
		}
	}
	return nil
}
