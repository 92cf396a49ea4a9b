package tftp

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
)

// objects are the Service and the endpoints of so many pods.
func objects(r *harness.Harness, pods int) (*corev1.Service, *discoveryv1.EndpointSlice) {
	name, port, protocol, ready := "tftp", int32(tftpPort), corev1.ProtocolUDP, true
	service := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "lab", Name: "tftp"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.69", ClusterIPs: []string{"10.96.0.69"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: name, Protocol: protocol, Port: port, NodePort: nodePort}}},
	}
	slice := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  metav1.ObjectMeta{Namespace: "lab", Name: "tftp-1", Labels: map[string]string{discoveryv1.LabelServiceName: "tftp"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
	}
	for i := range pods {
		pod := r.Cluster.Pod(0, i)
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{pod.IPv4.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}, NodeName: &pod.Node})
	}
	return service, slice
}

// serveNodePort starts kube-proxy with a helper, and conntrack in the pods; or an agent,
// which assigns helpers itself.
func serveNodePort(ctx context.Context, r *harness.Harness, s step) error {
	c := r.Cluster
	service, slice := objects(r, s.replicas)
	for i := range s.replicas {
		if s.kernel.podTimeout == 0 {
			break
		}
		// A pod with rules of a CNI or mesh tracks, as the published ones did.
		cmd := c.Pod(0, i).Command(ctx, "nft", "add table inet track; add chain inet track in { type filter hook prerouting priority 0; }; "+
			"add rule inet track in ct state invalid accept")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("track in %s: %w: %s", c.Pod(0, i).Name, err, strings.TrimSpace(string(out)))
		}
	}
	if s.peer != "" {
		if _, err := r.API(ctx, c.Client(1), service, slice); err != nil {
			return err
		}
		if err := r.KubeProxy(ctx, c.Node(0), s.peer, 0); err != nil {
			return err
		}
		cmd := c.Node(0).Command(ctx, "iptables", "-w", "-t", "raw", "-A", "PREROUTING", "-p", "udp", "--dport", fmt.Sprint(nodePort), "-j",
			"CT", "--helper", "tftp")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("assign helper on %s: %w: %s: is the module nf_conntrack_tftp there?", c.Node(0).Name, err,
				strings.TrimSpace(string(out)))
		}
		return nil
	}
	dir, err := writeManifests(r, service, slice)
	if err != nil {
		return err
	}
	autopilot := "off"
	if s.autopilot {
		autopilot = "on"
	}
	return r.Agent(ctx, c.Node(0), dir, s.mode, "--conntrack-autopilot", autopilot)
}

// writeManifests writes the Nodes and these objects.
func writeManifests(r *harness.Harness, objects ...any) (dir string, err error) {
	text, err := r.Cluster.NodesYAML()
	if err != nil {
		return "", err
	}
	for _, o := range objects {
		one, err := yaml.Marshal(o)
		if err != nil {
			return "", fmt.Errorf("write manifest: %w", err)
		}
		text = append(append(text, "---\n"...), one...)
	}
	_, err = r.WriteFile("manifests/tftp.yaml", text)
	return r.Path("manifests"), err
}

// conclude describes each row's share of metal.
func conclude(res *experiment.Result) []string {
	var out, parts []string
	disturbed := false
	if metal := res.Row("metal"); metal != nil {
		base, ok := metal.Value("rate")
		for _, row := range res.Rows {
			v, has := row.Value("rate")
			if !ok || !has || row.Name == "metal" || base.Median == 0 {
				continue
			}
			text := fmt.Sprintf("%s %.2f", row.Name, v.Median/base.Median)
			if p := row.Published["rate"]; p > 0 {
				text += fmt.Sprintf(" (published: %.2f)", p/metal.Published["rate"])
			}
			disturbed = disturbed || v.Median > 1.15*base.Median
			parts = append(parts, text)
		}
	}
	if len(parts) > 0 {
		out = append(out, "Measured, transfers/s as a share of metal: "+strings.Join(parts, "; ")+".")
	}
	if disturbed {
		out = append(out, "A share above metal's is impossible: another program on this machine disturbed metal's row, so these shares mean "+
			"little. Run the experiment again, alone.")
	}
	return append(out, "Why it may differ: since 5.0 a UDP flow counts as a stream, with the longer timeout, only after 2 s; a full "+
		"table evicts unconfirmed entries "+
		"(early_drop) before it drops packets, and short transfers are such entries; a server that answers at once frees the client's port "+
		"sooner. "+
		"With eBPF the node makes neither entries nor expectations for these packets; a pod that tracks is still held to its own table. The "+
		"autopilot may change timeouts of the node's "+
		"namespace; sizes belong to the machine's first namespace, where the lab's nodes are not, so there it can only advise.")
}
