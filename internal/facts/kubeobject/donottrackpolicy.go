package kubeobject

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/model"
)

// DoNotTrackPolicy converts a policy. It refuses the policies that the CRD's schema
// refuses, because files bypass the API server.
func DoNotTrackPolicy(o *v1alpha1.DoNotTrackPolicy) (*model.DoNotTrackPolicy, []model.Problem) {
	c := newClusterChecker(model.KindDoNotTrackPolicy, o.Name)
	c.checkName(o.Name)
	spec := field.NewPath("spec")
	p := &model.DoNotTrackPolicy{
		Name: o.Name, Version: versionOf(o.Spec), Created: o.CreationTimestamp.Time,
		Track: o.Spec.Track,
	}
	if deny := o.Spec.Deny; deny != nil && *deny == "" {
		c.invalidf(spec.Child("deny"), "is empty; write %q, or leave it out to deny nothing", v1alpha1.DenyOthers)
	} else if deny != nil {
		c.oneOf(spec.Child("deny"), *deny, v1alpha1.DenyOthers)
		p.DenyOthers = true
	}
	c.policySubject(spec, &o.Spec, p)
	c.atMost(spec.Child("ingress"), len(o.Spec.Ingress), maxRules)
	c.atMost(spec.Child("egress"), len(o.Spec.Egress), maxRules)
	for i, r := range o.Spec.Ingress {
		at := spec.Child("ingress").Index(i)
		p.Ingress = append(p.Ingress, c.policyRule(at, r.Ports, at.Child("from"), r.From))
	}
	for i, r := range o.Spec.Egress {
		at := spec.Child("egress").Index(i)
		p.Egress = append(p.Egress, c.policyRule(at, r.Ports, at.Child("to"), r.To))
	}
	if len(p.Ingress)+len(p.Egress) == 0 {
		c.invalidf(spec, "has neither ingress nor egress; add the traffic that the policy matches")
	}
	if c.invalid {
		return nil, c.problems
	}
	return p, c.problems
}

// versionOf identifies a spec.
func versionOf(spec v1alpha1.DoNotTrackPolicySpec) string {
	text, err := json.Marshal(spec)
	if err != nil {
		return "" // no spec: it has been decoded from JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// policySubject parses the selection of a policy. It refuses a selection of everything.
// Such a policy would remove a port of the whole cluster from conntrack, and with it the
// state of NAT and firewalls.
func (c *checker) policySubject(spec *field.Path, s *v1alpha1.DoNotTrackPolicySpec, p *model.DoNotTrackPolicy) {
	pods := s.PodSelector != nil || s.NamespaceSelector != nil
	switch {
	case pods && s.NodeSelector != nil:
		c.invalidf(spec.Child("nodeSelector"), "cannot be combined with a selection of pods; write one policy for pods and one for nodes")
	case pods:
		p.Pods = c.podSelection(spec, s.NamespaceSelector, s.PodSelector)
		if everything(p.Pods.Namespaces) && everything(p.Pods.Pods) {
			at := spec.Child("podSelector")
			if s.PodSelector == nil {
				at = spec.Child("namespaceSelector")
			}
			c.invalidf(at, "selects every pod of the cluster; select fewer pods")
		}
	case s.NodeSelector != nil:
		sel := c.selector(spec.Child("nodeSelector"), s.NodeSelector)
		p.Nodes = &sel
		if sel.Everything() {
			c.invalidf(spec.Child("nodeSelector"), "selects every node; select fewer nodes")
		}
	default:
		c.invalidf(spec, "selects nothing; give podSelector, namespaceSelector or nodeSelector")
	}
}

func everything(s *model.Selector) bool { return s == nil || s.Everything() }

func (c *checker) podSelection(at *field.Path, namespaces, pods *metav1.LabelSelector) *model.PodSelection {
	out := &model.PodSelection{}
	if namespaces != nil {
		s := c.selector(at.Child("namespaceSelector"), namespaces)
		out.Namespaces = &s
	}
	if pods != nil {
		s := c.selector(at.Child("podSelector"), pods)
		out.Pods = &s
	}
	return out
}

// Maximum lengths of lists, as in the CRD.
const (
	maxRules       = 16 // of each direction
	maxPortsOfRule = 64
	maxPeersOfRule = 128
	maxExcepts     = 32
)

func (c *checker) policyRule(at *field.Path, ports []v1alpha1.Port, atPeers *field.Path, peers []v1alpha1.Peer) model.PolicyRule {
	var r model.PolicyRule
	if len(ports) == 0 {
		c.invalidf(at.Child("ports"), "is empty; list the ports")
	}
	c.atMost(at.Child("ports"), len(ports), maxPortsOfRule)
	c.atMost(atPeers, len(peers), maxPeersOfRule)
	for i, p := range ports {
		r.Ports = append(r.Ports, c.portRange(at.Child("ports").Index(i), p))
	}
	for i, p := range peers {
		r.Peers = append(r.Peers, c.policyPeer(atPeers.Index(i), p))
	}
	return r
}

func (c *checker) portRange(at *field.Path, p v1alpha1.Port) model.PortRange {
	r := model.PortRange{Protocol: c.protocol(at.Child("protocol"), p.Protocol), First: c.port(at.Child("port"), p.Port)}
	r.Last = r.First
	if p.EndPort != nil {
		r.Last = c.port(at.Child("endPort"), *p.EndPort)
		if r.Last < r.First {
			c.invalidf(at.Child("endPort"), "%d is below port %d", *p.EndPort, p.Port)
		}
	}
	return r
}

func (c *checker) policyPeer(at *field.Path, p v1alpha1.Peer) model.PolicyPeer {
	pods := p.PodSelector != nil || p.NamespaceSelector != nil
	switch {
	case p.IPBlock != nil && pods:
		c.invalidf(at.Child("ipBlock"), "cannot be combined with a selection of pods; make them two peers")
	case p.IPBlock != nil:
		return c.ipBlock(at.Child("ipBlock"), p.IPBlock)
	case !pods:
		c.invalidf(at, "is empty; give ipBlock, podSelector or namespaceSelector")
	}
	return model.PolicyPeer{Pods: c.podSelection(at, p.NamespaceSelector, p.PodSelector)}
}

func (c *checker) ipBlock(at *field.Path, b *v1alpha1.IPBlock) model.PolicyPeer {
	cidr, ok := c.exactPrefix(at.Child("cidr"), b.CIDR)
	out := model.PolicyPeer{Block: cidr}
	c.atMost(at.Child("except"), len(b.Except), maxExcepts)
	for i, s := range b.Except {
		e, good := c.exactPrefix(at.Child("except").Index(i), s)
		if !good || !ok {
			continue
		}
		if e.Bits() <= cidr.Bits() || !cidr.Contains(e.Addr()) {
			c.invalidf(at.Child("except").Index(i), "%s is not a part of %s", s, b.CIDR)
			continue
		}
		out.Except = append(out.Except, e)
	}
	slices.SortFunc(out.Except, netip.Prefix.Compare)
	return out
}
