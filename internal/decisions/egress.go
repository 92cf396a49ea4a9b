package decisions

import (
	"slices"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// egressState is the state of egress.
type egressState struct {
	mode  egress.Mode
	facts egress.Facts
	wrong []string
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
	plan, wrong := egress.Decide(t.egress.mode, t.egress.facts,
		egress.Node{Addrs: n.Addrs, Pods: n.KnownPods, PodCIDRs: n.PodCIDRs, ClusterCIDRs: n.ClusterCIDRs})
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
