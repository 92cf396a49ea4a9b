package flood

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/test/testbed/topology"
)

const namespace = "flood"

// objects are the two Services and their EndpointSlices.
func objects(c *topology.Cluster) (out []runtime.Object) {
	for i, port := range []int32{herePort, elsewherePort} {
		name := []string{"here", "elsewhere"}[i]
		out = append(out, service(name, fmt.Sprintf("10.96.0.%d", 10+i), port), slice(name, c.Pod(i, 0)))
	}
	return out
}

// manifests are the same as text, with the cluster's Nodes.
func manifests(c *topology.Cluster) ([]byte, error) {
	nodes, err := c.NodesYAML()
	if err != nil {
		return nil, err
	}
	var out strings.Builder
	out.Write(nodes)
	for _, o := range objects(c) {
		text, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("write manifest: %w", err)
		}
		fmt.Fprintf(&out, "---\n%s", text)
	}
	return []byte(out.String()), nil
}

func service(name, clusterIP string, nodePort int32) *corev1.Service {
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: podPort, NodePort: nodePort}},
		},
	}
}

func slice(name string, pod *topology.Host) *discoveryv1.EndpointSlice {
	unnamed, port, protocol, ready := "", int32(podPort), corev1.ProtocolTCP, true
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &unnamed, Port: &port, Protocol: &protocol}},
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{pod.IPv4.String()}, NodeName: &pod.Node,
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		}},
	}
}
