package path

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// The measured Services: one with its pod on node0, one with its pod on node1, and one whose node
// answers clients directly.
const (
	hereNodePort   = 30080
	thereNodePort  = 30081
	directNodePort = 30082
)

var (
	hereClusterIP   = netip.MustParseAddr("10.96.0.10")
	thereClusterIP  = netip.MustParseAddr("10.96.0.11")
	directClusterIP = netip.MustParseAddr("10.96.0.12")
)

// benchService is one of them.
type benchService struct {
	name      string
	clusterIP netip.Addr
	nodePort  int32
	pod       *topology.Host
}

func benchServices(c *topology.Cluster) []benchService {
	return []benchService{
		{"web-here", hereClusterIP, hereNodePort, c.Pod(0, 0)},
		{"web-there", thereClusterIP, thereNodePort, c.Pod(1, 0)},
	}
}

// writeManifests writes the agents' manifests and returns the directory. direct adds the Service
// of DSR replies, which eBPF alone has.
func writeManifests(r *harness.Harness, tftp, direct bool) (string, error) {
	text, err := manifests(r.Cluster, tftp, direct)
	if err != nil {
		return "", err
	}
	if _, err := r.WriteFile("manifests/bench.yaml", text); err != nil {
		return "", err
	}
	return r.Path("manifests"), nil
}

// manifests returns the Nodes, Services and EndpointSlices of the cluster.
func manifests(c *topology.Cluster, tftp, direct bool) ([]byte, error) {
	port, protocol := int32(podPort), corev1.ProtocolTCP
	if tftp {
		port, protocol = tftpPort, corev1.ProtocolUDP
	}
	nodes, err := c.NodesYAML()
	if err != nil {
		return nil, err
	}
	out := strings.Builder{}
	out.Write(nodes)
	var objects []any
	for _, s := range benchServices(c) {
		objects = append(objects, service(s.name, s.clusterIP, s.nodePort, port, protocol), slice(s.name, s.pod, port, protocol))
	}
	if direct {
		svc := service("web-direct", directClusterIP, directNodePort, port, protocol)
		svc.Annotations = map[string]string{intent.BalanceAnnotation: intent.Maglev.String(), intent.ForwardingAnnotation: intent.Hybrid}
		objects = append(objects, svc, slice(svc.Name, c.Pod(1, 0), port, protocol))
	}
	for _, o := range objects {
		text, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("write manifest: %w", err)
		}
		fmt.Fprintf(&out, "---\n%s", text)
	}
	return []byte(out.String()), nil
}

func service(name string, clusterIP netip.Addr, nodePort, port int32, protocol corev1.Protocol) *corev1.Service {
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name},
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeNodePort,
			ClusterIP:  clusterIP.String(),
			ClusterIPs: []string{clusterIP.String()},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Protocol: protocol, Port: port, NodePort: nodePort}},
		},
	}
}

func slice(service string, pod *topology.Host, port int32, protocol corev1.Protocol) *discoveryv1.EndpointSlice {
	unnamed, ready := "", true
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: service + "-ipv4",
			Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &unnamed, Port: &port, Protocol: &protocol}},
		Endpoints: []discoveryv1.Endpoint{{
			Addresses:  []string{pod.IPv4.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			NodeName:   &pod.Node,
		}},
	}
}
