package doctor

import (
	"fmt"
	"slices"

	"spillway.dev/spillway/internal/node/ruleset"
)

// masqueradeNotRandom reports source NAT rules without --random-fully.
type masqueradeNotRandom struct{}

func (masqueradeNotRandom) Name() string  { return "masquerading" }
func (masqueradeNotRandom) About() string { return "do masquerade and SNAT rules choose random ports" }

func (masqueradeNotRandom) Find(n *Node) []Finding {
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
		ID: "masquerade-not-random", Severity: Info, Namespace: ns.Namespace.String(), Object: nodeObject(owner),
		Title:   "new connections can lose their first packet: source ports are not chosen at random by rules of " + owner,
		Numbers: map[string]float64{"rules": float64(len(rules)), "insert_failed": float64(ns.Counters.InsertFailed)},
		Packets: "New connections stall for 1 s or more: two connections that start at the same time from one port to one address get the " +
			"same source port, and one loses its first packet.",
		Remedy: "Add --random-fully (nft: fully-random) to the rule, or give spillway agent --egress auto: then connections of Pods do not " +
			"meet the rule. " + howToKeep[owner],
	}
	if owner == "" {
		f.Title = "new connections can lose their first packet: source ports are not chosen at random by rules of an unknown owner"
		f.Remedy += "Change it in the configuration of its owner too."
	}
	if ns.Counters.InsertFailed > 0 && ns.exhaustedPorts() == "" {
		f.Severity = Warning
	}
	f.Evidence = append(f.Evidence, fmt.Sprintf("insert_failed %d, found %d in this namespace", ns.Counters.InsertFailed, ns.Counters.Found))
	for _, r := range rules {
		f.Evidence = append(f.Evidence, r.Where()+": "+r.Text)
		if ns.lacksPorts(r) {
			// Its command would undo the command of snat-ports-exhausted.
			f.Remedy = "Give the rule more ports first: see snat-ports-exhausted. Then run doctor again. " + howToKeep[owner]
			continue
		}
		if command := r.MakeRandom(); command != "" {
			f.Commands = append(f.Commands, ns.Namespace.EnterCommand()+command)
		}
	}
	return f
}

// howToKeep tells, by owner, how to make the program itself write the rule with
// random ports. The command alone lasts until the program rewrites its rules.
var howToKeep = map[string]string{
	"kube-proxy": "kube-proxy does this if the iptables in its image is 1.6.2 or newer: use a newer image, or " +
		"replace kube-proxy by spillway agent.",
	"flannel": "flanneld does this if its iptables knows the option: use a newer image. The command lasts until " +
		"flanneld rewrites its rules.",
	"Docker": "Docker has no setting for this: run the command after dockerd starts (a drop-in with " +
		"ExecStartPost), or disable its masquerading (--ip-masq=false) and write the rule yourself.",
	"Calico": "Calico does this if its iptables knows the option (FelixConfiguration featureDetectOverride: " +
		"MASQFullyRandom=true).",
	"ip-masq-agent": "Start ip-masq-agent with --random-fully=true.",
	"AWS VPC CNI":   "Set AWS_VPC_K8S_CNI_RANDOMIZESNAT=prng in the DaemonSet aws-node.",
	"Cilium":        "Use Cilium's own masquerading (bpf.masquerade=true), or iptablesRandomFully=true in its Helm values.",
	"a CNI plugin (bridge, portmap)": "Plugins since 0.8.0 do this if iptables knows the option. Rules of running pods stay until the " +
		"pods are recreated.",
}
