package doctor

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/page"
)

// rpFilterStrict reports tunnels whose reverse path filter drops clients' packets that other
// nodes forward to Pods of this node. IPv6 has no such filter.
type rpFilterStrict struct{}

func (rpFilterStrict) Name() string { return "rp_filter" }
func (rpFilterStrict) About() string {
	return "reverse path filters of tunnels to Pods"
}

func (rpFilterStrict) Find(n *Node) []Finding {
	ns := n.Own()
	if n.Traffic == nil || ns == nil {
		return nil
	}
	pods := slices.DeleteFunc(slices.Clone(n.Traffic.DSR.ThroughStack), func(e DSREndpoint) bool { return !e.Endpoint.Addr().Is4() })
	var devices, commands []string
	for _, l := range ns.Links {
		if l.StrictSource {
			devices = append(devices, l.Name)
			commands = append(commands, sysctl(ns.Namespace, rpFilter(l.Name), 2))
		}
	}
	if len(pods) == 0 || len(devices) == 0 {
		return nil
	}
	f := Finding{
		ID: "rp-filter-strict", Severity: Warning, Namespace: ns.Namespace.String(),
		Title: fmt.Sprintf("DSR replies fail: the reverse path filter of %s drops clients' packets to %s", strings.Join(devices, ", "),
			page.Counted(len(pods), "Pod")),
		Numbers: map[string]float64{"devices": float64(len(devices)), "pods": float64(len(pods))},
		Evidence: []string{fmt.Sprintf("rp_filter of %s is 1 (strict), and the route to clients outside the cluster leads by another device",
			strings.Join(devices, ", ")),
			"a NetworkPolicy or the agent's settings send packets to these Pods through the node's stack:"},
		Packets: "Another node forwards a client's packet by the tunnel, with the client's address. Where it traverses the stack, the " +
			"kernel drops it (IP_RPFILTER). " +
			"The client repeats its SYN after a second, and that node then uses its own address.",
		Remedy: "Set rp_filter of the tunnel to 2 (loose), and add it to /etc/sysctl.d to keep it. The larger value of the device and of " +
			"\"all\" counts.",
		Commands: commands,
	}
	for i := range pods[:min(len(pods), shownEndpoints)] {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s of Service %s", pods[i].name(), pods[i].Service))
	}
	if more := len(pods) - shownEndpoints; more > 0 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("and %d more", more))
	}
	return []Finding{f}
}

// rpFilter is the sysctl of a device, whose name may have dots.
func rpFilter(device string) string {
	return "net.ipv4.conf." + strings.ReplaceAll(device, ".", "/") + ".rp_filter"
}
