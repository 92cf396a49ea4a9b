package scripts

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// portTexts returns a text for each Service port, by its name, and one for each
// healthCheckNodePort.
func (r *recorder) portTexts() map[string]string {
	out := map[string]string{}
	for id, p := range r.ports {
		if id.Service.Namespace != canaryNamespace {
			out[id.String()] = portText(p)
		}
	}
	for name, hc := range r.checks {
		out[checkName(name)] = fmt.Sprintf("  port %d, ready endpoints on this node: %d\n", hc.Port, hc.Endpoints)
	}
	return out
}

func checkName(service model.Name) string { return service.String() + " health check" }

func portText(p *intent.ServicePort) string {
	var b strings.Builder
	for _, f := range p.Frontends {
		fmt.Fprintf(&b, "  %s\n", frontendText(f))
	}
	for _, e := range p.Endpoints {
		fmt.Fprintf(&b, "  endpoint %s\n", endpointText(e))
	}
	for _, e := range p.ServingUnselected {
		fmt.Fprintf(&b, "  endpoint %s serving-but-not-selected\n", e.Addr)
	}
	if p.Affinity > 0 {
		fmt.Fprintf(&b, "  affinity %v\n", p.Affinity)
	}
	if p.Helper != 0 {
		fmt.Fprintf(&b, "  helper %s\n", p.Helper)
	}
	return b.String()
}

var (
	kinds = map[intent.FrontendKind]string{intent.ClusterIP: "ClusterIP", intent.NodePort: "NodePort", intent.ExternalIP: "ExternalIP",
		intent.LoadBalancerIP: "LoadBalancerIP"}
	routes = map[intent.Route]string{intent.Reject: "reject", intent.Drop: "drop", intent.ToCluster: "cluster", intent.ToLocal: "local"}
)

func frontendText(f intent.Frontend) string {
	text := fmt.Sprintf("%s %s", kinds[f.Kind], netip.AddrPortFrom(f.Addr, f.Port))
	if f.Kind == intent.NodePort {
		text = fmt.Sprintf("NodePort %d", f.Port)
	}
	if f.ExternalRoute == f.InternalRoute {
		text += " -> " + routes[f.InternalRoute]
	} else {
		text += fmt.Sprintf(" -> external: %s, internal: %s", routes[f.ExternalRoute], routes[f.InternalRoute])
	}
	if f.SourceRanges != nil {
		text += fmt.Sprintf(", only from %v", f.SourceRanges)
	}
	return text
}

func endpointText(e intent.Endpoint) string {
	text := e.Addr.String()
	for _, flag := range []struct {
		on   bool
		name string
	}{
		{e.ClusterPolicy, "cluster"}, {e.LocalPolicy, "local"},
		{e.OnThisNode, "on-this-node"}, {e.NodeUnknown, "node-unknown"}, {e.HostNetwork, "host-network"},
		{e.MustTraverseNetfilter, "must-traverse-netfilter"}, {e.AllowsAny, "allows-any"},
	} {
		if flag.on {
			text += " " + flag.name
		}
	}
	return text
}

// serviceText prints all Service ports.
func (r *recorder) serviceText() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	texts := r.portTexts()
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		fmt.Fprintf(&b, "%s\n%s", name, texts[name])
	}
	return b.String()
}

// services prints all Service ports; later changes are compared with them.
func (r *recorder) services() string {
	defer r.look()
	return r.serviceText()
}

// look makes the present state the one that changes compares with.
func (r *recorder) look() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen, r.replaced = r.portTexts(), false
	clear(r.calls)
}

// changes prints which Service ports were written since the last call of services or
// changes, each with the lines that differ.
func (r *recorder) changes() string {
	defer r.look()
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	if r.replaced {
		fmt.Fprintln(&b, "replace all")
	}
	now := r.portTexts()
	names := maps.Clone(r.calls)
	for name := range r.seen {
		if now[name] == "" && names[name] == "" {
			names[name] = "delete"
		}
	}
	for name, text := range now {
		if r.seen[name] != text && names[name] == "" {
			names[name] = "write"
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		fmt.Fprintln(&b, names[name], name)
		had, has := slices.Collect(strings.Lines(r.seen[name])), slices.Collect(strings.Lines(now[name]))
		for _, line := range without(had, has) {
			b.WriteString("-" + line[1:])
		}
		for _, line := range without(has, had) {
			b.WriteString("+" + line[1:])
		}
	}
	return b.String()
}

func without(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(line string) bool { return slices.Contains(b, line) })
}

// nodeText prints what the dataplane knows of the node.
func (r *recorder) nodeText() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	n := r.node
	fmt.Fprintf(&b, "%s %v\n", n.Name, n.Addrs)
	for _, line := range []struct {
		name string
		list any
		any  bool
	}{
		{"NodePort addresses", n.NodePortAddrs, len(n.NodePortAddrs) > 0},
		{"NodePorts on loopback", n.LoopbackNodePorts, len(n.LoopbackNodePorts) > 0},
		{"pod CIDRs", n.PodCIDRs, len(n.PodCIDRs) > 0},
		{"cluster CIDRs", n.ClusterCIDRs, len(n.ClusterCIDRs) > 0},
		{"other nodes", n.Peers, len(n.Peers) > 0},
		{"known pods", n.KnownPods, len(n.KnownPods) > 0},
		{"must traverse netfilter", n.MustTraverseNetfilter, len(n.MustTraverseNetfilter) > 0},
		{"deny rule", n.DenyRuleOnlyPods, len(n.DenyRuleOnlyPods) > 0},
		{"unhooked pods", n.UnhookedPods, len(n.UnhookedPods) > 0},
		{"NetworkPolicies exist", n.PoliciesExist, n.PoliciesExist},
		{"leaving", n.Leaving, n.Leaving},
	} {
		if line.any {
			fmt.Fprintf(&b, "  %s: %v\n", line.name, line.list)
		}
	}
	return b.String()
}

// policyText prints the targets of policies with their verdicts, and the rules.
func (r *recorder) policyText() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, t := range slices.SortedFunc(maps.Keys(r.policy.Targets), donottrack.Target.Compare) {
		v := r.policy.Verdicts[r.policy.Targets[t]]
		ports := fmt.Sprint(t.First)
		if t.Last != t.First {
			ports += fmt.Sprint("-", t.Last)
		}
		fmt.Fprintf(&b, "%s %s %s %s: %s, %s by %s\n", t.Side, t.Addr, t.Protocol, ports,
			either(v.Track, "tracked", "untracked"), either(v.Deny, "others denied", "others allowed"), strings.Join(v.Rules, " "))
	}
	for _, name := range slices.Sorted(maps.Keys(r.policy.Rules)) {
		fmt.Fprintf(&b, "rule %s: peers %s\n", name, r.peers(name))
	}
	return b.String()
}

func (r *recorder) peers(name string) string {
	rule := r.policy.Rules[name]
	if rule.AnyPeer {
		return "any"
	}
	var peers []string
	for _, block := range rule.Blocks {
		peers = append(peers, fmt.Sprintf("%s-%s", block.First, block.Last))
	}
	for m := range r.policy.Members {
		if m.Rule == name {
			peers = append(peers, m.Addr.String())
		}
	}
	slices.Sort(peers)
	return cmp.Or(strings.Join(peers, " "), "none")
}

func either(is bool, yes, no string) string {
	if is {
		return yes
	}
	return no
}
