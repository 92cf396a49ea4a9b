package doctor

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
)

// hooksCheck looks for programs of others that meet packets before Spillway's.
type hooksCheck struct{}

func (hooksCheck) Name() string  { return "eBPF programs in front" }
func (hooksCheck) About() string { return "tcx programs of others before Spillway's" }

// ownPrograms are the names of Spillway's tc programs (bpf/tc.bpf.c).
var ownPrograms = []string{"from_network", "to_network", "from_pod", "to_pod"}

// Find reports each device once. It cannot tell what the program in front returns.
func (hooksCheck) Find(n *Node) (out []Finding) {
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		for _, l := range ns.Links {
			var evidence []string
			front := 0
			for _, dir := range []string{"ingress", "egress"} {
				programs := l.Programs[dir]
				own := slices.IndexFunc(programs, func(name string) bool { return slices.Contains(ownPrograms, name) })
				if own > 0 {
					front += own
					evidence = append(evidence, fmt.Sprintf("%s %s: %s", l.Name, dir, escape.Text(strings.Join(programs, ", then "))))
				}
			}
			if front == 0 {
				continue
			}
			out = append(out, Finding{
				ID: "tcx-program-in-front", Severity: Warning, Namespace: ns.Namespace.String(),
				Title:    "another eBPF program on " + l.Name + " sees packets before Spillway's",
				Evidence: evidence,
				Numbers:  map[string]float64{"programs_in_front": float64(front)},
				Packets:  "A packet that the program in front accepts (TC_ACT_OK), drops or redirects never reaches Spillway: Services on this device stop or keep their untranslated addresses. One that it passes on (TCX_NEXT) is served.",
				Mend:     "Let the other program return TCX_NEXT (-1), or let its owner attach it behind. Spillway takes the first place only when it attaches; it does not move afterwards.",
				Commands: []string{fmt.Sprintf("%sbpftool net show dev %s", ns.Namespace.EnterCommand(), escape.Shell(l.Name))},
			})
		}
	}
	return out
}
