package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// iptablesBothVariants reports rules in both variants of iptables.
type iptablesBothVariants struct{}

func (iptablesBothVariants) Name() string  { return "iptables variants" }
func (iptablesBothVariants) About() string { return "whether only one of legacy and nft has rules" }

func (iptablesBothVariants) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		counts := ns.Rules.Counts()
		for _, tool := range []string{"iptables", "ip6tables"} {
			legacy, nft := tool+"-legacy", tool+"-nft"
			if counts[legacy] == 0 || counts[nft] == 0 {
				continue
			}
			less, more := legacy, nft
			if counts[legacy] > counts[nft] {
				less, more = nft, legacy
			}
			f := Finding{
				ID: "iptables-both-variants", Severity: Warning, Namespace: ns.Namespace.String(), Object: nodeObject(tool),
				Title:    "packets traverse two rule sets: both variants of " + tool + " have rules",
				Evidence: []string{holds(ns, more, counts[more]), holds(ns, less, counts[less])},
				Numbers:  map[string]float64{"legacy": float64(counts[legacy]), "nft": float64(counts[nft])},
				Packets: "One variant may drop packets that the other accepts or translates, since every packet traverses both. Each tool shows " +
					"only its own rules.",
				Remedy: fmt.Sprintf("Make the owners of the smaller rule set use %s (update-alternatives --set %s /usr/sbin/%s, or a newer "+
					"image), stop them, save a copy, and remove their rules; or restart the machine.",
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
	return fmt.Sprintf("%s has %s %s", command, page.Counted(rules, "rule"), ownersOf(ns, command))
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

// ownersOf counts the rules of a command by owner: "(kube-proxy 12, unknown 3)".
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
