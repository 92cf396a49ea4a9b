package decisions

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// EgressAddressesAnnotation of a Node has the ranges of --egress-addresses, and takes precedence on that node.
const EgressAddressesAnnotation = model.AnnotationPrefix + "egress-addresses"

// egressState is the state of egress.
type egressState struct {
	mode  egress.Mode
	facts egress.Facts
	own   nodeRanges
	wrong []string
}

// nodeRanges are the ranges of EgressAddressesAnnotation.
type nodeRanges struct {
	text  string
	set   bool   // the Node has the annotation
	wrong string // why text has no effect
	good  bool   // ranges are of the last text without an error
	last  []netip.Prefix
}

// update takes the annotation of the Node, and reports whether it has changed. The last good value stays until the
// annotation is deleted.
func (r *nodeRanges) update(n *model.Node) bool {
	var text string
	var set bool
	if n != nil {
		text, set = n.Annotations[EgressAddressesAnnotation]
	}
	if text == r.text && set == r.set {
		return false
	}
	if !set {
		*r = nodeRanges{}
		return true
	}
	r.text, r.set, r.wrong = text, true, ""
	ranges, err := egress.ParseAddresses(text)
	if err != nil {
		r.wrong = fmt.Sprintf("does what it did before, without annotation %s: %v", EgressAddressesAnnotation, err)
		return true
	}
	r.good, r.last = true, ranges
	return true
}

// SetEgress sets what egress depends on beside the node, and returns what that changes.
func (t *Tracker) SetEgress(mode egress.Mode, facts egress.Facts) Changes {
	t.egress.mode, t.egress.facts = mode, facts
	problems := t.decideEgress(t.services.Node())
	c := t.servicesChanged()
	if c.Egress == nil {
		c.Egress = problems
	}
	return c
}

// decideEgress decides anew. It returns all Problems if they have changed, else nil.
func (t *Tracker) decideEgress(n intent.Node) []model.Problem {
	facts := t.egress.facts
	facts.AddressesOf = "--egress-addresses"
	if t.egress.own.good {
		facts.Addresses, facts.AddressesOf = t.egress.own.last, "annotation "+EgressAddressesAnnotation
	}
	plan, wrong := egress.Decide(t.egress.mode, facts,
		egress.Node{Addrs: n.Addrs, Pods: n.KnownPods, PodCIDRs: n.PodCIDRs, ClusterCIDRs: n.ClusterCIDRs})
	if why := t.egress.own.wrong; why != "" && t.egress.mode != egress.Off && t.egress.mode != "" {
		wrong = append(wrong, why)
	}
	t.services.SetEgress(plan)
	if slices.Equal(wrong, t.egress.wrong) {
		return nil
	}
	t.egress.wrong = wrong
	problems := []model.Problem{}
	for _, what := range wrong {
		problems = append(problems, model.ClusterProblem(model.KindNode, n.Name, "egress", what))
	}
	return problems
}
