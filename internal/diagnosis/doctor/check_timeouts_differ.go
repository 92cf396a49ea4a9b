package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"spillway.dev/spillway/internal/page"
)

// timeoutsDiffer compares the timeouts of pods with the node's.
type timeoutsDiffer struct{}

func (timeoutsDiffer) Name() string  { return "timeouts of pods" }
func (timeoutsDiffer) About() string { return "whether they equal the node's timeouts" }

func (timeoutsDiffer) Find(n *Node) []Finding {
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
	f.Title = fmt.Sprintf("entries live longer or shorter than on the node: conntrack timeouts differ in %s",
		page.Counted(count, "other network namespace"))
	f.Numbers["namespaces"] = float64(count)
	f.Packets = "The tables of pods fill independently of the node's: settings of the node do not apply to them. A packet of a pod may " +
		"be tracked twice, in the pod's namespace and in the node's."
	f.Remedy = "If pods need conntrack (a rule of a mesh or a sidecar requires it), give them the node's timeouts: running pods by " +
		"command, new pods by their securityContext."
	f.Settings = podSettings(set)
	return []Finding{f}
}
