package kubeobject

import (
	"maps"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

// NetworkPolicy converts a NetworkPolicy without its rules, which the CNI applies. An
// invalid policy becomes UnreadNetworkPolicy, with problems.
func NetworkPolicy(o *networkingv1.NetworkPolicy) (*model.NetworkPolicy, []model.Problem) {
	c, name := newChecker("NetworkPolicy", &o.ObjectMeta)
	named := !c.invalid
	spec := field.NewPath("spec")
	n := &model.NetworkPolicy{
		Name:     name,
		Selector: c.selector(spec.Child("podSelector"), &o.Spec.PodSelector),
	}
	if len(o.Spec.PolicyTypes) == 0 { // the API's default
		n.Ingress, n.Egress = true, len(o.Spec.Egress) > 0
	}
	for i, t := range o.Spec.PolicyTypes {
		switch t {
		case networkingv1.PolicyTypeIngress:
			n.Ingress = true
		case networkingv1.PolicyTypeEgress:
			n.Egress = true
		default:
			c.invalidf(spec.Child("policyTypes").Index(i), "%q is unknown; use Ingress, Egress", t)
		}
	}
	if c.invalid && named {
		n, what := UnreadNetworkPolicy(name)
		c.report(spec.String(), what)
		return n, c.problems
	}
	if c.invalid {
		return nil, c.problems
	}
	return n, c.problems
}

// UnreadNetworkPolicy represents a policy that cannot be read, and reports it. It selects
// every pod of its namespace. The CNI may be able to read the policy, and a pod that
// counted as unselected would bypass it.
func UnreadNetworkPolicy(name model.Name) (n *model.NetworkPolicy, what string) {
	return &model.NetworkPolicy{Name: name, Ingress: true, Egress: true},
		"is taken to select every pod of namespace " + name.Namespace + ", in both directions, until it can be read"
}

func (c *checker) selector(p *field.Path, s *metav1.LabelSelector) model.Selector {
	for _, err := range metav1validation.ValidateLabelSelector(s, metav1validation.LabelSelectorValidationOptions{}, p) {
		c.invalid = true
		c.report(err.Field, err.ErrorBody())
	}
	out := model.Selector{MatchLabels: maps.Clone(s.MatchLabels)}
	for _, e := range s.MatchExpressions {
		out.Expressions = append(out.Expressions, model.Requirement{
			Key:      e.Key,
			Operator: string(e.Operator),
			Values:   slices.Clone(e.Values),
		})
	}
	return out
}
