package intent

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// BalanceAnnotation says how a new flow chooses an endpoint of a Service: one of the names of
// Balance, or weighted, which is random with shares by weight.
const BalanceAnnotation = "spillway.dev/balance"

// weighted is the value of BalanceAnnotation that WeightsAnnotation needs.
const weighted = "weighted"

// Balance is a way to choose an endpoint among the shares of a route.
type Balance uint8

// The ways to choose. LeastConnections and Latency compare two random endpoints by what this node
// knows: its own flows and handshakes.
const (
	Random           Balance = iota
	LeastConnections         // the endpoint with fewer active flows
	Latency                  // the endpoint with the smaller product of active flows and handshake time
	Maglev                   // by the client's address and port, the same on all nodes: ServicePort.Table
)

var balanceNames = []string{Random: "random", LeastConnections: "least", Latency: "latency", Maglev: "maglev"}

// String is the annotation's value.
func (b Balance) String() string { return balanceNames[b] }

// ByLoad says that the dataplane must know the load of endpoints.
func (b Balance) ByLoad() bool { return b == LeastConnections || b == Latency }

// ByClient says that the client's address and port choose.
func (b Balance) ByClient() bool { return b == Maglev }

// balanceOf reads the annotations of a Service about the choice of endpoints.
func (c *Config) balanceOf(svc *model.Service, complain func(field, what string)) (Balance, *weightsSpec) {
	name, set := svc.Annotations[BalanceAnnotation]
	switch name {
	case weighted:
		return Random, weightsOf(svc, complain)
	case Maglev.String():
		return c.maglevOf(svc, complain), weightsOf(svc, complain)
	}
	if _, listed := svc.Annotations[WeightsAnnotation]; listed && (name == "" || slices.Contains(balanceNames, name)) {
		what := "needs " + BalanceAnnotation + ": weighted, and has no effect; add that annotation or remove this one"
		if set && name != "" {
			what = "has no effect with " + BalanceAnnotation + ": " + name + "; use weighted or maglev there, or remove this annotation"
		}
		complain(annotationField(WeightsAnnotation), what)
	}
	field := annotationField(BalanceAnnotation)
	b := Balance(max(slices.Index(balanceNames, name), 0))
	switch {
	case set && name != b.String():
		complain(field, fmt.Sprintf("%q is not a way to choose endpoints, and random is used; use %s or %s", name,
			strings.Join(balanceNames, ", "), weighted))
	case b.ByLoad() && !c.BalanceByLoad:
		complain(field, fmt.Sprintf("%s has no effect on this node, and random is used: its agent needs --proxy-mode ebpf and --balance-by-load",
			b))
		return Random, nil
	case b.ByLoad() && svc.Affinity > 0:
		complain(field, fmt.Sprintf("%s has no effect with spec.sessionAffinity, and random is used: clients return to their endpoint; "+
			"remove one of the two", b))
		return Random, nil
	}
	return b, nil
}

// maglevOf returns Maglev unless this node or the Service cannot have it.
func (c *Config) maglevOf(svc *model.Service, complain func(field, what string)) Balance {
	field := annotationField(BalanceAnnotation)
	switch {
	case c.MaglevSize == 0:
		complain(field, "maglev has no effect on this node, and random is used: its agent needs --proxy-mode ebpf")
	case svc.Affinity > 0:
		complain(field, "maglev has no effect with spec.sessionAffinity, and random is used: clients return to their endpoint; remove one "+
			"of the two")
	default:
		return Maglev
	}
	return Random
}
