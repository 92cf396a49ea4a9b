package iptables

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/facts/model"
)

// namesFound limits the number of chains of one kind that a message names.
const namesFound = 5

// Drifted is nil. All programs share the nf_tables tables, and each run of iptables
// writes from another socket. So notifications would not distinguish the agent's own
// writes.
func (b *Backend) Drifted() <-chan struct{} { return nil }

// Repaired returns the changes of other programs that syncs have reverted since the last
// call.
func (b *Backend) Repaired() dataplane.Repair {
	r := b.repaired
	b.repaired = dataplane.Repair{}
	return r
}

// repairOf counts and names the chains and jumps that differ.
func repairOf(f model.Family, diffs []difference) (r dataplane.Repair) {
	for i := range diffs {
		r.Missing += len(diffs[i].fill) + len(diffs[i].edits)
		r.Foreign += len(diffs[i].gone)
	}
	r.Found = strings.Join(describeDifferences(f, diffs), "; ")
	return r
}

// describeDifferences describes for each table of a family how the kernel's rules differ from the
// wanted ones: "IPv4 table nat: emptied SPW-SVC-…; jumps of PREROUTING changed".
func describeDifferences(f model.Family, diffs []difference) (found []string) {
	for i := range diffs {
		if words := diffs[i].found(); len(words) > 0 {
			found = append(found, fmt.Sprintf("%s table %s: %s", f, diffs[i].table, strings.Join(words, ", ")))
		}
	}
	return found
}

func (d *difference) found() (words []string) {
	chains := map[string][]string{"added": d.gone}
	for _, c := range d.fill {
		how := "changed"
		if s, there := d.have.chains[c.name]; !there {
			how = "removed"
		} else if s.rules == 0 {
			how = "emptied"
		}
		chains[how] = append(chains[how], c.name)
	}
	for _, how := range []string{"removed", "emptied", "changed", "added"} {
		if names := chains[how]; len(names) > 0 {
			words = append(words, "chain "+listFirst(names)+" "+how)
		}
	}
	var from []string
	for _, edit := range d.edits { // "-D PREROUTING …"
		from = append(from, strings.Fields(edit)[1])
	}
	if from = slices.Compact(from); len(from) > 0 {
		words = append(words, "jump from "+listFirst(from)+" changed")
	}
	return words
}

func listFirst(names []string) string {
	some := strings.Join(names[:min(len(names), namesFound)], ", ")
	if more := len(names) - namesFound; more > 0 {
		some += fmt.Sprintf(" and %d more", more)
	}
	return some
}
