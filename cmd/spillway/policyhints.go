package main

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// hint tells of NetworkPolicies that an untracked flow and whoever enforces them do not
// go together with: its answers belong to no connection.
func (w *flowWorld) hint(e *explanation) {
	for _, d := range e.Decisions {
		if d.Outcome != policy.Untracked {
			continue
		}
		client, server := d.Peer, d.Addr
		if (d.Decision.Side == policy.Egress) != (d.SourcePorts != "") {
			client, server = server, client
		}
		w.hintOf(client, "ingress", func(p *model.NetworkPolicy) bool { return p.Ingress })
		w.hintOf(server, "egress", func(p *model.NetworkPolicy) bool { return p.Egress })
	}
}

// hintOf tells of a NetworkPolicy that isolates who sends or gets answers, in their direction.
func (w *flowWorld) hintOf(a netip.Addr, direction string, isolates func(*model.NetworkPolicy) bool) {
	var first *model.NetworkPolicy
	for _, pod := range w.world.Pods {
		for _, p := range w.world.NetworkPolicies {
			if slices.Contains(pod.IPs, a) && p.Namespace == pod.Namespace && isolates(p) && p.Selector.Matches(pod.Labels) &&
				(first == nil || p.String() < first.String()) { // the same one each time
				first = p
			}
		}
	}
	if first == nil {
		return
	}
	note := fmt.Sprintf("NetworkPolicy %s isolates %s for %s: if whoever enforces it lets answers pass by connection state, "+
		"these do not, having none (ct state untracked)", first.Name, a, direction)
	if !slices.Contains(w.notes, note) {
		w.notes = append(w.notes, note)
	}
}
