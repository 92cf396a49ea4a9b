// Package doctor looks at a node and says what is wrong with its connection
// tracking and its NAT rules, in their own numbers, and what mends it. It needs
// no agent, no API server and no Service of Spillway's.
//
//	kernel, /proc, rules ──Look──> Node ──Checks──> Findings ──Mend──> sysctls, entries
//	                               read once        pure
//
// A Check is a file of its own and sees only the Node; to write one, see
// check.go.
package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/node/conntrack"
)

// Severity says how much a Finding matters.
type Severity string

// The severities: packets are lost now or will be soon; packets may be lost;
// good to know.
const (
	Critical Severity = "critical"
	Warning  Severity = "warning"
	Info     Severity = "info"
)

// Severities are all of them, the worst first.
var Severities = []Severity{Critical, Warning, Info}

// AtLeast reports whether s is as bad as t.
func (s Severity) AtLeast(t Severity) bool {
	return slices.Index(Severities, s) <= slices.Index(Severities, t)
}

// Finding is one thing that is wrong.
type Finding struct {
	ID        string   `json:"id"` // stable; docs/doctor.md has them all
	Severity  Severity `json:"severity"`
	Namespace string   `json:"namespace,omitempty"` // network namespace; "" for the whole machine
	Title     string   `json:"title"`
	Evidence  []string `json:"evidence"`
	// Numbers are those of the evidence, for programs.
	Numbers map[string]float64 `json:"numbers,omitempty"`
	Packets string             `json:"packets"` // what it means for them
	Mend    string             `json:"mend"`    // what to do
	// Commands do it, each a line for a shell, run by root on the node.
	Commands []string `json:"commands,omitempty"`
	// Settings are YAML for those who make pods; a comment says whose each is.
	Settings string `json:"settings,omitempty"`
	// Fixable says that --fix does it.
	Fixable bool `json:"fixable"`

	fixes []fix
}

// add puts fixes to the finding.
func (f Finding) with(fixes ...fix) Finding {
	f.fixes = append(f.fixes, fixes...)
	f.Fixable = len(f.fixes) > 0
	return f
}

// Check looks for one sort of trouble. Find only reads the Node.
type Check interface {
	Name() string  // short, for people: what is checked
	About() string // what is compared with what, in a few words
	Find(*Node) []Finding
}

// Checks are all of them, in the order of their findings.
var Checks = []Check{
	tableCheck{}, expectationCheck{}, insertCheck{}, chainCheck{}, masqueradeCheck{},
	silentCheck{}, differCheck{}, helperCheck{}, bridgeCheck{}, variantCheck{},
	rulesCheck{}, staleCheck{}, invalidCheck{}, checksumCheck{}, ipsecCheck{}, hooksCheck{},
}

// Examine has every check look at the node. The worst findings come first.
func Examine(n *Node) []Finding {
	findings := []Finding{}
	for _, c := range Checks {
		findings = append(findings, c.Find(n)...)
	}
	slices.SortStableFunc(findings, func(a, b Finding) int {
		return cmp.Compare(slices.Index(Severities, a.Severity), slices.Index(Severities, b.Severity))
	})
	return findings
}

// percent is a part of a whole as people read it.
func percent(part, whole int) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

// names lists namespaces, a few by name.
func names(list []string) string {
	const shown = 4
	if len(list) <= shown+1 {
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:shown], ", "), len(list)-shown)
}

// grew writes a counter with what it grew by while doctor looked.
func grew(name string, total, by uint64, n *Node) string {
	s := fmt.Sprintf("%s %d since this namespace was made", name, total)
	if n.Sampled > 0 {
		s += fmt.Sprintf(", %d of them in the last %.1f s", by, n.Sampled.Seconds())
	}
	return s
}

// sysctl is the command that sets one in a namespace.
func sysctl(n conntrack.Namespace, name string, value any) string {
	return fmt.Sprintf("%ssysctl -w %s=%v", n.EnterCommand(), name, value)
}
