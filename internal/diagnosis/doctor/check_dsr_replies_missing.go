package doctor

import (
	"fmt"
	"slices"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// dsrRepliesMissing reports clients that an endpoint on another node does not answer directly.
type dsrRepliesMissing struct{}

func (dsrRepliesMissing) Name() string { return "DSR replies" }
func (dsrRepliesMissing) About() string {
	return "SYNs repeated to endpoints that answer directly"
}

// Without a broken path, DSR replies are a finding if leastRepeated connections and a
// repeatedShare-th of all had none within a minute.
const (
	leastRepeated = 5
	repeatedShare = 20
)

// shownEndpoints is how many endpoints a finding names.
const shownEndpoints = 5

func (dsrRepliesMissing) Find(n *Node) []Finding {
	if n.Traffic == nil {
		return nil
	}
	d := &n.Traffic.DSR
	broken := slices.DeleteFunc(slices.Clone(d.Broken), n.Traffic.dead)
	some := len(d.Broken) == 0 && len(n.Traffic.Unanswered) == 0 && d.Unanswered >= leastRepeated && d.Unanswered*repeatedShare >= d.Announced
	if len(broken) == 0 && !some {
		return nil
	}
	f := Finding{
		ID: "dsr-replies-missing", Severity: Warning,
		Title: fmt.Sprintf("new clients wait for a second: %d of the last %d got no direct reply", d.Unanswered, d.Announced),
		Numbers: map[string]float64{"endpoints": float64(len(broken)), "working_endpoints": float64(d.Working), "announced": float64(d.Announced),
			"unanswered": float64(d.Unanswered)},
		Packets: "Such a client repeats its SYN after a second. This node then forwards it with its own address: the client is served, and " +
			"the endpoint does not see the client's address. " +
			"After five such clients in a row, all clients of the endpoint get this node's address for a minute.",
		Remedy: d.remedy(broken),
	}
	if len(broken) > 0 {
		f.Title = "new clients wait for a second: " + brokenText(broken, d.MoreBroken)
	}
	d.describe(&f, broken)
	return []Finding{f}
}

// dead reports whether an endpoint does not answer clients with this node's address either.
func (t *Traffic) dead(e DSREndpoint) bool {
	return slices.ContainsFunc(t.Unanswered, func(u FailingEndpoint) bool { return u.Endpoint == e.Endpoint.String() })
}

func brokenText(broken []DSREndpoint, more int) string {
	e := &broken[0]
	if len(broken)+more == 1 {
		return fmt.Sprintf("%s does not answer the clients of Service %s directly", e.name(), e.Service)
	}
	return fmt.Sprintf("%d endpoints do not answer them directly, such as %s", len(broken)+more, e.name())
}

// describe adds evidence and commands.
func (d *DSRReplies) describe(f *Finding, broken []DSREndpoint) {
	for i := range broken[:min(len(broken), shownEndpoints)] {
		e := &broken[i]
		last := "no direct reply has arrived yet"
		if e.Answered > 0 {
			last = fmt.Sprintf("the last direct reply arrived %.0f s ago", e.Answered.Seconds())
		}
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s of Service %s: clients repeated %s in a row, the last %.0f s ago; %s", e.name(),
			e.Service, page.Counted(e.Failures, "SYN"), e.Failed.Seconds(), last))
		command := fmt.Sprintf("spillway drops --address %s --port %d --for 10s", e.Endpoint.Addr(), e.Endpoint.Port())
		if e.Node != "" {
			command += " # on node " + escape.Text(e.Node)
		}
		f.Commands = append(f.Commands, command)
	}
	if more := len(broken) + d.MoreBroken - shownEndpoints; more > 0 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("and %s", page.Counted(more, "more endpoint")))
	}
	f.Evidence = append(f.Evidence, page.Counted(d.Working, "other endpoint")+" answered clients directly within the last 5 minutes")
	if d.Window > 0 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%d of %s in the last %.0f s had no reply after a second", d.Unanswered,
			page.Counted(int(d.Announced), "DSR connection"), d.Window.Seconds()))
	}
}

// remedy names the likely causes.
func (d *DSRReplies) remedy(broken []DSREndpoint) string {
	const (
		node = "Look at the endpoint's node: its agent has no --dsr-key-file or another secret " +
			"(spillway_ebpf_drops_total{reason=\"dsr\"} grows there), or a NetworkPolicy or rp_filter drops the packets (rp-filter-strict). "
		network = "Look at the network: it must forward SYNs with IP options, and packets of a node with the Service's address as source " +
			"(AWS: source/destination check, Azure: IP forwarding, GCP: canIpForward). " +
			"A stateful firewall or NAT between clients and nodes must not need both directions to pass the same node. "
		until = "Until then, spillway.dev/forwarding: snat on the Service avoids the wait."
	)
	if len(broken) > 0 && d.Working > 0 {
		return "Other endpoints answer directly. " + node + network + until
	}
	return network + node + until
}
