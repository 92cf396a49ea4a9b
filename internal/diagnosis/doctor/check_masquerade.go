package doctor

import (
	"fmt"
	"slices"

	"spillway.dev/spillway/internal/diagnosis/doctor/ruleset"
)

// masqueradeCheck looks for source NAT without --random-fully.
type masqueradeCheck struct{}

func (masqueradeCheck) Name() string  { return "masquerading" }
func (masqueradeCheck) About() string { return "do masquerade and SNAT rules choose random ports" }

func (masqueradeCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		var owners []string
		rules := map[string][]*ruleset.Rule{}
		for _, r := range ns.Rules.Rules {
			translates, random := r.SourceNAT()
			if !translates || random || r.Element() {
				continue
			}
			owner := r.Owner()
			if !slices.Contains(owners, owner) {
				owners = append(owners, owner)
			}
			rules[owner] = append(rules[owner], r)
		}
		for _, owner := range owners {
			out = append(out, masqueradeFinding(ns, owner, rules[owner]))
		}
	}
	return out
}

func masqueradeFinding(ns *Namespace, owner string, rules []*ruleset.Rule) Finding {
	f := Finding{
		ID: "masquerade-not-random", Severity: Info, Namespace: ns.Namespace.String(),
		Title:   "source ports are not chosen at random by rules of " + owner,
		Numbers: map[string]float64{"rules": float64(len(rules)), "insert_failed": float64(ns.Counters.InsertFailed)},
		Packets: "Two connections from one port to one address that begin at once are given the same port; one loses its first packet (1 s and 3 s stalls).",
		Mend:    "Put --random-fully (nft: fully-random) on the rule. " + howToKeep[owner],
	}
	if owner == "" {
		f.Title = "source ports are not chosen at random by rules of an unknown owner"
		f.Mend += "Change it where it is written down too."
	}
	if ns.Counters.InsertFailed > 0 {
		f.Severity = Warning
	}
	f.Evidence = append(f.Evidence, fmt.Sprintf("insert_failed %d, found %d in this namespace", ns.Counters.InsertFailed, ns.Counters.Found))
	for _, r := range rules {
		f.Evidence = append(f.Evidence, r.Where()+": "+r.Text)
		if command := r.MakeRandom(); command != "" {
			f.Commands = append(f.Commands, ns.Namespace.EnterCommand()+command)
		}
	}
	return f
}

// howToKeep says how a program is brought to write the rule so by itself. The
// command alone lasts until the program writes its rules again.
var howToKeep = map[string]string{
	"kube-proxy":                     "kube-proxy does so by itself if the iptables in its image is 1.6.2 or newer: use a newer image, or spillway agent in its place.",
	"flannel":                        "flanneld does so by itself if its iptables knows the option: use a newer image; the command lasts until flanneld writes its rules again.",
	"Docker":                         "Docker has no setting for it: run the command after dockerd has started (a drop-in with ExecStartPost), or turn its masquerading off (--ip-masq=false) and write the rule yourself.",
	"Calico":                         "Calico does so by itself if its iptables knows the option (FelixConfiguration featureDetectOverride: MASQFullyRandom=true).",
	"ip-masq-agent":                  "Start ip-masq-agent with --random-fully=true.",
	"AWS VPC CNI":                    "Set AWS_VPC_K8S_CNI_RANDOMIZESNAT=prng in the DaemonSet aws-node.",
	"Cilium":                         "Use Cilium's own masquerading (bpf.masquerade=true), or iptablesRandomFully=true in its Helm values.",
	"a CNI plugin (bridge, portmap)": "Plugins from 0.8.0 on do so by themselves if iptables knows the option; rules of running pods stay until the pods are made anew.",
}
