package doctor

import (
	"fmt"

	"spillway.dev/spillway/internal/page"
)

// bridgeCall are the sysctls of br_netfilter, each namespace's own since Linux
// 5.3.
var bridgeCall = map[string]string{
	"ip": "net.bridge.bridge-nf-call-iptables", "ip6": "net.bridge.bridge-nf-call-ip6tables",
}

// bridgeNetfilter compares bridges and NAT rules with br_netfilter.
type bridgeNetfilter struct{}

func (bridgeNetfilter) Name() string { return "br_netfilter" }
func (bridgeNetfilter) About() string {
	return "whether bridged frames traverse netfilter"
}

func (bridgeNetfilter) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		var bridges []string
		for _, l := range ns.Links {
			if l.Kind == "bridge" && l.Ports >= 2 {
				bridges = append(bridges, fmt.Sprintf("%s (%s)", l.Name, page.Counted(l.Ports, "port")))
			}
		}
		f := Finding{Namespace: ns.Namespace.String(), Numbers: map[string]float64{"bridges": float64(len(bridges))},
			Evidence: []string{"bridges: " + names(bridges), fmt.Sprintf("%s is %s", bridgeCall["ip"], onOff(ns.Bridged))}}
		switch translates := destNAT(ns); {
		case len(bridges) == 0:
			continue
		case translates && !ns.Bridged["ip"]:
			f.ID, f.Severity = "bridge-netfilter-off", Warning
			f.Title = "connections to a Service hang when the endpoint is on the client's bridge: replies bypass the NAT rules"
			f.Packets = "The connection hangs: the client gets the reply from the endpoint's own address and rejects it. Endpoints outside " +
				"this bridge work."
			f.Remedy = "Enable it, and add it to /etc/modules-load.d and /etc/sysctl.d to keep it. Frames between ports then traverse the " +
				"FORWARD chain too: check that it accepts them. Not needed where sockets are translated (spillway agent with ebpf)."
			if ns.Bridged == nil {
				f.Commands = append(f.Commands, "modprobe br_netfilter")
			}
			f.Commands = append(f.Commands, sysctl(ns.Namespace, bridgeCall["ip"], 1))
		case !translates && ns.Bridged["ip"] && ns.Entries > 0:
			f.ID, f.Severity = "bridge-netfilter-on", Info
			f.Title = "bridged frames fill the conntrack table, although no rule translates them"
			f.Packets = "Every connection across the bridge traverses iptables and takes a conntrack entry. A FORWARD chain that drops also " +
				"drops its packets."
			f.Remedy = "Disable it if no rule needs to see bridged packets (kube-proxy and NetworkPolicies in iptables do)."
			f.Commands = append(f.Commands, sysctl(ns.Namespace, bridgeCall["ip"], 0))
		default:
			continue
		}
		out = append(out, f)
	}
	return out
}

func onOff(bridged map[string]bool) string {
	switch {
	case bridged == nil:
		return "missing: br_netfilter is not loaded"
	case bridged["ip"]:
		return "1"
	}
	return "0"
}
