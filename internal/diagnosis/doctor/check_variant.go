package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
)

// variantCheck looks for rules in both variants of iptables.
type variantCheck struct{}

func (variantCheck) Name() string  { return "iptables variants" }
func (variantCheck) About() string { return "rules in only one of legacy and nft" }

func (variantCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		held := ns.Rules.Held()
		for _, tool := range []string{"iptables", "ip6tables"} {
			legacy, nft := tool+"-legacy", tool+"-nft"
			if held[legacy] == 0 || held[nft] == 0 {
				continue
			}
			less, more := legacy, nft
			if held[legacy] > held[nft] {
				less, more = nft, legacy
			}
			f := Finding{
				ID: "iptables-both-variants", Severity: Warning, Namespace: ns.Namespace.String(),
				Title:    "both variants of " + tool + " hold rules",
				Evidence: []string{holds(ns, more, held[more]), holds(ns, less, held[less])},
				Numbers:  map[string]float64{"legacy": float64(held[legacy]), "nft": float64(held[nft])},
				Packets:  "Every packet goes through both. What one accepts or translates the other may still drop, and each tool shows only its own half.",
				Mend: fmt.Sprintf("Bring the owners of the fewer rules to use %s (update-alternatives --set %s /usr/sbin/%s; a newer image of theirs), stop them, keep a copy, and take their rules out; or restart the machine.",
					more, tool, more),
			}
			enter := ns.Namespace.EnterCommand()
			f.Commands = append(f.Commands, fmt.Sprintf("%s%s-save > /root/%s.rules", enter, less, less))
			for _, table := range tablesOf(ns, less) {
				table = escape.Shell(table)
				f.Commands = append(f.Commands, fmt.Sprintf("%s%s -t %s -F", enter, less, table), fmt.Sprintf("%s%s -t %s -X", enter, less, table))
			}
			out = append(out, f)
		}
	}
	return out
}

func holds(ns *Namespace, command string, rules int) string {
	return fmt.Sprintf("%s holds %s %s", command, plural(rules, "rule"), ownersOf(ns, command))
}

func tablesOf(ns *Namespace, command string) []string {
	tables := map[string]bool{}
	for _, r := range ns.Rules.Rules {
		if r.Command == command {
			tables[r.Table] = true
		}
	}
	return slices.Sorted(maps.Keys(tables))
}

// ownersOf counts whose rules a command holds: "(kube-proxy 12, unknown 3)".
func ownersOf(ns *Namespace, command string) string {
	count := map[string]int{}
	for _, r := range ns.Rules.Rules {
		if r.Command == command && !r.Element() {
			owner := r.Owner()
			if owner == "" {
				owner = "unknown"
			}
			count[owner]++
		}
	}
	var parts []string
	for _, owner := range slices.Sorted(maps.Keys(count)) {
		parts = append(parts, fmt.Sprintf("%s %d", owner, count[owner]))
	}
	return "(" + strings.Join(parts, ", ") + ")"
}
