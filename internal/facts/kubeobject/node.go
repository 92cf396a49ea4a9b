package kubeobject

import (
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

// Node converts a Node: its internal addresses first, then its external ones.
func Node(o *corev1.Node) (*model.Node, []model.Problem) {
	c := newClusterChecker(model.KindNode, o.Name)
	c.checkName(o.Name)
	n := &model.Node{
		Name:     o.Name,
		PodCIDRs: c.podCIDRs(field.NewPath("spec"), &o.Spec),
		Labels:   maps.Clone(o.Labels),
		Leaving:  leaving(o),

		Annotations: c.ownAnnotations(o.Annotations),
	}
	addresses := field.NewPath("status", "addresses")
	for _, t := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for i, addr := range o.Status.Addresses {
			if addr.Type != t { // a host name or a DNS name
				continue
			}
			if a, ok := c.addr(addresses.Index(i).Child("address"), addr.Address); ok {
				if why := unusable(a, true); why != "" {
					c.notef(addresses.Index(i).Child("address"), "%s is %s and is left out: no node can be reached there", a, why)
					continue
				}
				if len(n.Addresses) == maxNodeAddresses {
					c.notef(addresses.Index(i), "and later entries are ignored: a node may have at most %d addresses", maxNodeAddresses)
					return c.node(n)
				}
				n.Addresses = append(n.Addresses, a)
			}
		}
	}
	return c.node(n)
}

func (c *checker) node(n *model.Node) (*model.Node, []model.Problem) {
	if c.invalid {
		return nil, c.problems
	}
	return n, c.problems
}

// maxNodeAddresses limits the addresses of one Node. A kubelet writes it, and every other
// node stores it.
const maxNodeAddresses = 64

// toBeDeleted is cluster-autoscaler's taint on a node that it will remove.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// leaving reports whether kube-proxy calls the node not eligible (KEP-3836).
func leaving(o *corev1.Node) bool {
	return !o.DeletionTimestamp.IsZero() ||
		slices.ContainsFunc(o.Spec.Taints, func(t corev1.Taint) bool { return t.Key == toBeDeleted })
}

// podCIDRs parses podCIDRs, or the older podCIDR, which repeats the first.
func (c *checker) podCIDRs(spec *field.Path, s *corev1.NodeSpec) []netip.Prefix {
	if len(s.PodCIDRs) == 0 && s.PodCIDR != "" {
		if n, ok := c.podCIDR(spec.Child("podCIDR"), s.PodCIDR); ok {
			return []netip.Prefix{n}
		}
		return nil
	}
	p := spec.Child("podCIDRs")
	if s.PodCIDR != "" && s.PodCIDR != s.PodCIDRs[0] {
		c.invalidf(p.Index(0), "%q differs from spec.podCIDR %q; make them equal, or leave one out", s.PodCIDRs[0], s.PodCIDR)
	}
	var out []netip.Prefix
	c.atMost(p, len(s.PodCIDRs), maxNodeAddresses)
	for i, s := range s.PodCIDRs[:min(len(s.PodCIDRs), maxNodeAddresses)] {
		if n, ok := c.podCIDR(p.Index(i), s); ok {
			out = append(out, n)
		}
	}
	return out
}

// The shortest prefixes of a node's pod range. A kubelet may write its Node, and every
// other node treats addresses in a podCIDR as pods of the cluster.
const (
	minPodBits4 = 8
	minPodBits6 = 16
)

// podCIDR parses a range of pods. It ignores a range that is too large for a node.
func (c *checker) podCIDR(p *field.Path, s string) (netip.Prefix, bool) {
	n, ok := c.prefix(p, s)
	if !ok {
		return n, false
	}
	least := minPodBits4
	if n.Addr().Is6() {
		least = minPodBits6
	}
	if n.Bits() < least {
		c.notef(p, "%s is left out: no node has that many pods; use /%d or longer", n, least)
		return n, false
	}
	if why := unusable(n.Addr(), true); why != "" {
		c.notef(p, "%s is left out: it begins with %s", n, why)
		return n, false
	}
	return n, true
}
