package intent

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// WeightsAnnotation has the weights of a weighted Service's endpoints, as PATTERN=WEIGHT,
// separated by spaces or commas. A pattern is a Pod name with *, an address or a prefix. The
// first that matches decides.
const WeightsAnnotation = "spillway.dev/weights"

const (
	// maxShares bounds the sum of the weights of a port: each share is an element in the
	// kernel.
	maxShares = 1 << 16
	// maxWeightRules bounds the work for each endpoint.
	maxWeightRules = 64
)

// weightRule is one entry of WeightsAnnotation.
type weightRule struct {
	pods   string       // a pattern of path.Match; "": addrs decides
	addrs  netip.Prefix // invalid: pods decides
	weight uint8
}

func (r *weightRule) matches(c *candidate) bool {
	if r.addrs.IsValid() {
		return r.addrs.Contains(c.addr.Addr())
	}
	ok, _ := path.Match(r.pods, c.ep.Pod.Name)
	return ok && c.ep.Pod.Name != ""
}

// weightsSpec is what the annotations of a Service say about weights. Nil: all endpoints
// have equal shares.
type weightsSpec struct{ rules []weightRule }

// weightsOf reads the weights of a Service that is weighted.
func weightsOf(svc *model.Service, complain func(field, what string)) *weightsSpec {
	return &weightsSpec{rules: parseWeights(svc.Annotations[WeightsAnnotation], complain)}
}

func annotationField(name string) string { return fmt.Sprintf("metadata.annotations[%s]", name) }

// parseWeights parses WeightsAnnotation. It leaves out entries that it cannot read.
func parseWeights(text string, complain func(field, what string)) (out []weightRule) {
	field := annotationField(WeightsAnnotation)
	for _, entry := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\t' }) {
		if len(out) == maxWeightRules {
			complain(field, fmt.Sprintf("has more than %d entries; those after them are left out; use fewer patterns", maxWeightRules))
			break
		}
		rule, err := parseWeight(entry)
		if err != nil {
			complain(field, fmt.Sprintf("entry %q %v, and is left out; use PATTERN=WEIGHT, such as web-canary-*=5", entry, err))
			continue
		}
		out = append(out, rule)
	}
	return out
}

func parseWeight(entry string) (rule weightRule, err error) {
	pattern, number, found := strings.Cut(entry, "=")
	if !found || pattern == "" {
		return rule, fmt.Errorf("has no pattern and weight")
	}
	weight, err := strconv.ParseUint(number, 10, 8)
	if err != nil || weight > model.MaxWeight {
		return rule, fmt.Errorf("has no weight from 0 to %d", model.MaxWeight)
	}
	rule.weight = uint8(weight)
	if addr, err := netip.ParseAddr(pattern); err == nil {
		rule.addrs = netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen())
	} else if prefix, err := netip.ParsePrefix(pattern); err == nil {
		rule.addrs = prefix
	} else if _, err := path.Match(pattern, ""); err != nil {
		return rule, fmt.Errorf("has a pattern that does not parse")
	} else {
		rule.pods = pattern
	}
	return rule, nil
}

// weightsKnown are weights of endpoints in one decision: thousands of ports have the same
// endpoints, and comparing patterns takes microseconds.
type weightsKnown map[*model.Endpoint]uint8

// of returns the weight of an endpoint that has one of w.
func (k *weightsKnown) of(w *weightsSpec, c *candidate) uint8 {
	if w == nil || len(w.rules) == 0 {
		return w.of(c)
	}
	weight, found := (*k)[c.ep]
	if !found {
		if *k == nil {
			*k = weightsKnown{}
		}
		weight = w.of(c)
		(*k)[c.ep] = weight
	}
	return weight
}

// of returns the weight of an endpoint: the Service's, else its slice's, else 1.
func (w *weightsSpec) of(c *candidate) uint8 {
	if w == nil {
		return 1
	}
	for i := range w.rules {
		if w.rules[i].matches(c) {
			return w.rules[i].weight
		}
	}
	if c.slice.Weight != nil {
		return *c.slice.Weight
	}
	return 1
}

// weights returns ServicePort.Weights for the candidates that some policy uses. allZero
// says that they are equal because none is above 0.
func (t *Tracker) weights(e *service, id PortID, cs []candidate, known *weightsKnown) (out []uint16, allZero bool) {
	if e.plan.weights == nil && e.starts == nil {
		return nil, false
	}
	for i := range cs {
		if c := &cs[i]; c.selected() {
			out = append(out, uint16(known.of(e.plan.weights, c)))
		}
	}
	if len(out) == 0 {
		return nil, false
	}
	allZero = slices.Max(out) == 0
	if e.starts == nil {
		return canonicalWeights(out), allZero
	}
	// Without a common divisor, the shares of all endpoints would change with one's first
	// and last step.
	t.ramp(e, id, cs, out)
	return boundedWeights(out, 1), allZero
}

// allWeightsZero returns the Problem of a port whose endpoints all have weight 0.
func allWeightsZero(service model.Name, id PortID) model.Problem {
	return model.ServiceProblem(service, annotationField(WeightsAnnotation),
		fmt.Sprintf("gives every %s endpoint of port %d/%s weight 0, and they get equal shares; give one a weight, or remove endpoints from "+
			"the Service to refuse clients",
			id.Family, id.Number, id.Protocol))
}

// canonicalWeights divides the weights by their common divisor. Equal weights are nil.
func canonicalWeights(ws []uint16) []uint16 {
	divisor := 0
	for _, w := range ws {
		divisor = gcd(int(w), divisor)
	}
	ws = boundedWeights(ws, max(divisor, 1))
	if !slices.ContainsFunc(ws, func(w uint16) bool { return w != ws[0] }) {
		return nil
	}
	return ws
}

// boundedWeights divides the weights by a divisor, or by a larger one if their sum exceeds
// maxShares.
func boundedWeights(ws []uint16, divisor int) []uint16 {
	for divisor < model.MaxWeight*slowStartSteps && dividedSum(ws, divisor) > maxShares {
		divisor++
	}
	for i, w := range ws {
		ws[i] = divided(w, divisor)
	}
	return ws
}

// divided rounds up: only the weight 0 becomes 0.
func divided(w uint16, divisor int) uint16 { return uint16((int(w) + divisor - 1) / divisor) }

func dividedSum(ws []uint16, divisor int) (sum int) {
	for _, w := range ws {
		sum += int(divided(w, divisor))
	}
	return sum
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// In reports whether a route uses the endpoint.
func (e *Endpoint) In(route Route) bool {
	return route == ToCluster && e.ClusterPolicy || route == ToLocal && e.LocalPolicy
}

// Shares returns the number of shares of a route's new flows that each of Endpoints gets;
// 0 for one that the route does not use, or that is ejected. If none is left, those that the
// route uses get equal shares: clients would be refused otherwise.
func (p *ServicePort) Shares(route Route) []int {
	out, sum := make([]int, len(p.Endpoints)), 0
	for i := range p.Endpoints {
		if e := &p.Endpoints[i]; e.In(route) && !e.Ejected {
			out[i] = p.weight(i)
			sum += out[i]
		}
	}
	if sum > 0 {
		return out
	}
	for i := range p.Endpoints {
		if p.Endpoints[i].In(route) {
			out[i] = 1
		}
	}
	return out
}

// allShares is the sum of the weights; 0 without any.
func (p *ServicePort) allShares() (sum int) {
	for _, w := range p.Weights {
		sum += int(w)
	}
	return sum
}

func (p *ServicePort) weight(i int) int {
	if p.Weights == nil {
		return 1
	}
	return int(p.Weights[i])
}
