package doctor

import "fmt"

// bridgeCall are the sysctls of br_netfilter, each namespace's own since Linux
// 5.3.
var bridgeCall = map[string]string{
	"ip": "net.bridge.bridge-nf-call-iptables", "ip6": "net.bridge.bridge-nf-call-ip6tables",
}

// bridgeCheck compares bridges and NAT rules with br_netfilter.
type bridgeCheck struct{}

func (bridgeCheck) Name() string  { return "br_netfilter" }
func (bridgeCheck) About() string { return "do frames between ports of a bridge go by the rules" }

func (bridgeCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		var bridges []string
		for _, l := range ns.Links {
			if l.Kind == "bridge" && l.Ports >= 2 {
				bridges = append(bridges, fmt.Sprintf("%s (%d ports)", l.Name, l.Ports))
			}
		}
		f := Finding{Namespace: ns.Namespace.String(), Numbers: map[string]float64{"bridges": float64(len(bridges))},
			Evidence: []string{"bridges: " + names(bridges), fmt.Sprintf("%s is %s", bridgeCall["ip"], onOff(ns.Bridged))}}
		switch translates := destNAT(ns); {
		case len(bridges) == 0:
			continue
		case translates && !ns.Bridged["ip"]:
			f.ID, f.Severity = "bridge-netfilter-off", Warning
			f.Title = "answers between two pods of one bridge pass by the NAT rules"
			f.Packets = "A pod that asks a Service whose endpoint is on the same bridge gets the answer from the endpoint's own address, and refuses it: the connection hangs. Endpoints elsewhere work."
			f.Mend = "Turn it on, and put it into /etc/modules-load.d and /etc/sysctl.d. Frames between ports then go by the FORWARD chain too: see that it lets them pass. Not needed where sockets are translated (spillway agent with ebpf)."
			if ns.Bridged == nil {
				f.Commands = append(f.Commands, "modprobe br_netfilter")
			}
			f.Commands = append(f.Commands, sysctl(ns.Namespace, bridgeCall["ip"], 1))
		case !translates && ns.Bridged["ip"] && ns.Entries > 0:
			f.ID, f.Severity = "bridge-netfilter-on", Info
			f.Title = "frames between ports of a bridge are tracked, and nothing translates"
			f.Packets = "Every frame that only crosses a bridge goes by iptables and takes a conntrack entry; a FORWARD chain that drops cuts it off."
			f.Mend = "Turn it off if no rule needs to see bridged packets (kube-proxy and NetworkPolicies in iptables do)."
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
		return "not there: br_netfilter is not loaded"
	case bridged["ip"]:
		return "1"
	}
	return "0"
}
