package topology

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/facts/model"
)

// Cluster is a set of hosts. It has no open files: any number of processes may load the
// same cluster.
type Cluster struct {
	Spec    Spec
	Status  string // one of the Status constants
	Created time.Time

	cgroupRoot           string
	nodes, pods, clients []*Host
}

// Node returns the i-th node. It panics if that does not exist, as Pod and Client do.
func (c *Cluster) Node(i int) *Host { return c.nodes[i] }

// Pod returns the i-th pod of a node.
func (c *Cluster) Pod(node, i int) *Host {
	if i < 0 || i >= c.Spec.PodsPerNode {
		panic(fmt.Sprintf("topology: node %d has no pod %d", node, i))
	}
	return c.pods[node*c.Spec.PodsPerNode+i]
}

// Client returns the i-th outside client.
func (c *Cluster) Client(i int) *Host { return c.clients[i] }

// Hosts returns all nodes, pods and clients, in that order.
func (c *Cluster) Hosts() []*Host {
	hosts := make([]*Host, 0, len(c.nodes)+len(c.pods)+len(c.clients))
	hosts = append(hosts, c.nodes...)
	hosts = append(hosts, c.pods...)
	return append(hosts, c.clients...)
}

// Find returns the host of that name ("node0", "node0-pod1", "client0"; the
// namespace's name will do, too).
func (c *Cluster) Find(name string) (*Host, error) {
	var names []string
	for _, h := range c.Hosts() {
		if name == h.Name || name == h.Namespace {
			return h, nil
		}
		names = append(names, h.Name)
	}
	return nil, fmt.Errorf("find host: cluster %q has no %q: it has %s", c.Spec.Name, name, strings.Join(names, ", "))
}

// NodeObjects returns a Kubernetes Node for each node: its InternalIPs, pod
// CIDRs, host name and zone.
func (c *Cluster) NodeObjects() []*corev1.Node {
	var out []*corev1.Node
	for _, h := range c.nodes {
		n := &corev1.Node{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: metav1.ObjectMeta{Name: h.Name, Labels: map[string]string{
				corev1.LabelHostname:     h.Name,
				corev1.LabelTopologyZone: h.Zone,
			}},
		}
		for _, p := range h.PodCIDRs {
			n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, p.String())
		}
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
		for _, a := range h.Addrs() {
			n.Status.Addresses = append(n.Status.Addresses,
				corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
		}
		n.Status.Addresses = append(n.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeHostName, Address: h.Name})
		out = append(out, n)
	}
	return out
}

// NodesYAML returns NodeObjects as a manifest of several documents.
func (c *Cluster) NodesYAML() ([]byte, error) {
	var out strings.Builder
	for _, n := range c.NodeObjects() {
		text, err := yaml.Marshal(n)
		if err != nil {
			return nil, fmt.Errorf("write Node %s: %w", n.Name, err)
		}
		fmt.Fprintf(&out, "---\n%s", text)
	}
	return []byte(out.String()), nil
}

// Nodes returns the nodes as the model has them.
func (c *Cluster) Nodes() []*model.Node {
	var out []*model.Node
	for _, h := range c.nodes {
		out = append(out, &model.Node{
			Name:      h.Name,
			Addresses: h.Addrs(),
			PodCIDRs:  h.PodCIDRs,
			Labels: map[string]string{
				corev1.LabelHostname:     h.Name,
				corev1.LabelTopologyZone: h.Zone,
			},
		})
	}
	return out
}
