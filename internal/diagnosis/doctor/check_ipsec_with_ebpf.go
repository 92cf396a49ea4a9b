package doctor

import (
	"fmt"

	"spillway.dev/spillway/internal/node/kernel"
)

// ipsecWithEBPF reports IPsec policies where the eBPF dataplane forwards packets.
type ipsecWithEBPF struct{}

func (ipsecWithEBPF) Name() string  { return "IPsec and eBPF" }
func (ipsecWithEBPF) About() string { return "IPsec policies where the eBPF dataplane runs" }

// shownPolicies is how many policies a finding lists.
const shownPolicies = 5

func (ipsecWithEBPF) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		if len(ns.IPsec) == 0 || !ns.EBPF {
			continue
		}
		f := Finding{
			ID: "ipsec-with-ebpf", Severity: Warning, Namespace: ns.Namespace.String(),
			Title: fmt.Sprintf("connections that this node forwards to other nodes are dropped if one of %d IPsec policies selects them",
				len(ns.IPsec)),
			Evidence: []string{"programs of Spillway's eBPF dataplane are attached here"},
			Numbers:  map[string]float64{"policies": float64(len(ns.IPsec))},
			Packets: "NodePort, LoadBalancer and externalIP connections to an endpoint on another node are dropped if a policy selects them: " +
				"eBPF programs would send them unencrypted. " +
				"Packets between pods that a policy selects traverse the stack, which encrypts or blocks them, and are slower than on the direct path.",
			Remedy: "Run the agent with --proxy-mode nftables on nodes with IPsec, or exclude the addresses of nodes and pods from the " +
				"policies (ip xfrm policy lists them).",
		}
		for i, p := range ns.IPsec {
			if i == shownPolicies {
				f.Evidence = append(f.Evidence, fmt.Sprintf("and %d more policies", len(ns.IPsec)-i))
				break
			}
			f.Evidence = append(f.Evidence, fmt.Sprintf("policy %s: from %s to %s", xfrmDirections[p.Dir], p.Src, p.Dst))
		}
		out = append(out, f)
	}
	return out
}

// xfrmDirections are the names that ip xfrm policy uses.
var xfrmDirections = map[kernel.XfrmDir]string{kernel.XfrmIn: "in", kernel.XfrmOut: "out", kernel.XfrmForward: "fwd"}
