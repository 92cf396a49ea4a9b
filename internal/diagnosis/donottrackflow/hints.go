package donottrackflow

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

// hint notes NetworkPolicies that may drop the answers of an untracked flow, because
// these belong to no connection.
func (x *explainer) hint(e *Explanation) {
	for _, d := range e.Decisions {
		if d.Outcome != donottrack.Untracked {
			continue
		}
		client, server := d.Peer, d.Addr
		if (d.Decision.Side == donottrack.Egress) != (d.SourcePorts != "") {
			client, server = server, client
		}
		x.hintOf(client, "ingress", func(p *model.NetworkPolicy) bool { return p.Ingress })
		x.hintOf(server, "egress", func(p *model.NetworkPolicy) bool { return p.Egress })
	}
}

// hintOf notes a NetworkPolicy that isolates the sender or the receiver of answers in
// their direction.
func (x *explainer) hintOf(a netip.Addr, direction string, isolates func(*model.NetworkPolicy) bool) {
	var first *model.NetworkPolicy
	for _, pod := range x.store.Pods {
		for _, p := range x.store.NetworkPolicies {
			if slices.Contains(pod.IPs, a) && p.Namespace == pod.Namespace && isolates(p) && p.Selector.Matches(pod.Labels) &&
				(first == nil || p.String() < first.String()) { // the same one in each run
				first = p
			}
		}
	}
	if first == nil {
		return
	}
	note := fmt.Sprintf("NetworkPolicy %s isolates %s for %s: if the CNI allows answers by connection state, "+
		"these do not, having none (ct state untracked)", first.Name, a, direction)
	if !slices.Contains(x.notes, note) {
		x.notes = append(x.notes, note)
	}
}
