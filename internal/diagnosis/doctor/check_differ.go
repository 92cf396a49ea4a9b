package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// differCheck compares the time-outs of pods with the node's.
type differCheck struct{}

func (differCheck) Name() string  { return "time-outs of pods" }
func (differCheck) About() string { return "are they the node's; each namespace has its own" }

func (differCheck) Find(n *Node) []Finding {
	own := n.Own()
	if own == nil || len(own.Limits.Timeouts) == 0 {
		return nil
	}
	type value struct {
		name    string
		timeout time.Duration
	}
	where := map[value][]string{}
	set := map[string]time.Duration{}
	f := Finding{ID: "timeouts-differ", Severity: Info, Numbers: map[string]float64{}}
	count := 0
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		here := map[string]time.Duration{}
		for name, t := range ns.Limits.Timeouts {
			if node, known := own.Limits.Timeouts[name]; known && node != t && ns.InUse() {
				where[value{name, t}] = append(where[value{name, t}], ns.Namespace.String())
				here[name], set[name] = node, node
			}
		}
		if len(here) > 0 {
			count++
			f.Commands = append(f.Commands, setTimeouts(ns.Namespace, here))
		}
	}
	if count == 0 {
		return nil
	}
	for _, v := range slices.SortedFunc(maps.Keys(where), func(a, b value) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.timeout, b.timeout))
	}) {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s: %v here, %v in %s", v.name, own.Limits.Timeouts[v.name], v.timeout, names(where[v])))
	}
	f.Title = fmt.Sprintf("conntrack's time-outs are not the node's in %s", plural(count, "other network namespace"))
	f.Numbers["namespaces"] = float64(count)
	f.Packets = "A packet of a pod may be tracked twice, in the pod's namespace and in the node's. What was tuned on the node does not hold in pods, whose tables fill by themselves."
	f.Mend = "If pods track at all (a rule of a mesh or a sidecar in them wants it), give them the node's time-outs: now by command, for new pods by their securityContext."
	f.Settings = podSettings(set)
	return []Finding{f}
}
