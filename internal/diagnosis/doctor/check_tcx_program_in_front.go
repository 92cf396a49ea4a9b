package doctor

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
)

// tcxProgramInFront reports programs of other owners that process packets before Spillway's.
type tcxProgramInFront struct{}

func (tcxProgramInFront) Name() string  { return "eBPF programs in front" }
func (tcxProgramInFront) About() string { return "tcx programs of other owners before Spillway's" }

// ownPrograms are the names of Spillway's tc programs (bpf/tc.bpf.c).
var ownPrograms = []string{"from_network", "to_network", "from_pod", "to_pod"}

// Find reports each device once. It cannot tell what the program in front returns.
func (tcxProgramInFront) Find(n *Node) (out []Finding) {
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
				ID: "tcx-program-in-front", Severity: Warning, Namespace: ns.Namespace.String(), Object: nodeObject(l.Name),
				Title:    "Services may not work on " + l.Name + ": another eBPF program processes packets before Spillway's",
				Evidence: evidence,
				Numbers:  map[string]float64{"programs_in_front": float64(front)},
				Packets: "Service packets on this device are lost or stay untranslated if the program in front accepts (TC_ACT_OK), drops or " +
					"redirects them. Packets for which it returns TCX_NEXT are served.",
				Remedy: "Make the other program return TCX_NEXT (-1), or make its owner attach it after Spillway's. Spillway attaches at the " +
					"front once and does not move later.",
				Commands: []string{fmt.Sprintf("%sbpftool net show dev %s", ns.Namespace.EnterCommand(), escape.Shell(l.Name))},
			})
		}
	}
	return out
}
