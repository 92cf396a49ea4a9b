// Package doctor finds problems of a node's connection tracking and NAT rules. Each
// finding has its evidence, its effect on packets, and a remedy. It needs no agent, no
// API server and no Spillway Service. An agent adds what it knows about Services (Traffic).
//
//	kernel, /proc, rules ──Load──> Node ──Checks──> Findings ──ApplyFixes──> sysctls, entries
//	agent ──────────────Traffic──> read once        pure
//
// Each Check has its own file, named after the id of its finding, and reads only the Node.
package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// Severity is the importance of a Finding.
type Severity string

// The severities. Critical: packets are lost now or soon. Warning: packets may be lost.
// Info: good to know.
const (
	Critical Severity = "critical"
	Warning  Severity = "warning"
	Info     Severity = "info"
)

// Severities lists every severity, the worst first.
var Severities = []Severity{Critical, Warning, Info}

// AtLeast reports whether s is as bad as t.
func (s Severity) AtLeast(t Severity) bool {
	return slices.Index(Severities, s) <= slices.Index(Severities, t)
}

// Finding is one problem.
type Finding struct {
	ID        string   `json:"id"` // stable; Kinds lists every id
	Severity  Severity `json:"severity"`
	Namespace string   `json:"namespace,omitempty"` // network namespace; "" for the whole machine
	Object    Object   `json:"object"`              // ID, Namespace and Object identify a finding of a node
	Title     string   `json:"title"`
	Evidence  []string `json:"evidence"`
	// Numbers are the values in the evidence, for programs.
	Numbers map[string]float64 `json:"numbers,omitempty"`
	Packets string             `json:"packets"` // effect on packets, then the cause
	Remedy  string             `json:"remedy"`
	// Commands carry out the remedy: one shell line each, run by root on the node.
	Commands []string `json:"commands,omitempty"`
	// Settings are YAML for the authors of pods; a comment names the object of each.
	Settings string `json:"settings,omitempty"`
	// Fixable reports that --fix applies the remedy.
	Fixable bool `json:"fixable"`
	// Documentation is the address of the runbook.
	Documentation string `json:"documentation,omitempty"`
	// Since is when an agent first saw it; zero: unknown.
	Since time.Time `json:"since,omitzero"`

	fixes []fix
}

// with returns the finding with fixes added.
func (f Finding) with(fixes ...fix) Finding {
	f.fixes = append(f.fixes, fixes...)
	f.Fixable = len(f.fixes) > 0
	return f
}

// Check finds one kind of problem. Find only reads the Node.
type Check interface {
	Name() string  // of the checked thing, short
	About() string // the comparison, in a few words
	Find(*Node) []Finding
}

// Checks lists every check, in the order of their findings.
var Checks = slices.Concat(nodeChecks, agentChecks)

// nodeChecks are the Checks that need no agent.
var nodeChecks = []Check{
	conntrackTableFull{}, expectationTableFull{}, snatPortsExhausted{}, insertFailed{}, conntrackBucketsFew{}, masqueradeNotRandom{},
	timeoutsLong{}, timeoutsDiffer{}, helperMissing{}, bridgeNetfilter{}, iptablesBothVariants{},
	rulesMany{}, staleUDPEntries{}, tcpNotLiberal{}, vxlanChecksumOffload{}, ipsecWithEBPF{}, tcxProgramInFront{},
	meshWithSocketHooks{}, nfsWithSocketHooks{},
}

// agentChecks are the Checks that read Node.Traffic: only a running agent knows it.
var agentChecks = []Check{
	endpointUnanswered{}, endpointRefuses{}, serviceWithoutEndpoints{}, sourceRangeRefuses{}, serviceSNATPortsExhausted{}, policyDenies{},
	nodePortTaken{}, flowTableFull{}, egressPortsExhausted{}, egressBypassesRules{}, dsrRepliesMissing{}, dsrEncapsulations{},
	rpFilterStrict{},
}

// NeedAgent returns those of the ids whose findings only a running agent can report.
func NeedAgent(ids []string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
		return !slices.ContainsFunc(Kinds, func(k Kind) bool { return k.ID == id && slices.Contains(agentChecks, k.Check) })
	})
}

// checksOf returns the checks that can report findings of these ids; all without ids.
func checksOf(ids []string) []Check {
	if len(ids) == 0 {
		return Checks
	}
	return slices.DeleteFunc(slices.Clone(Checks), func(c Check) bool {
		return !slices.ContainsFunc(Kinds, func(k Kind) bool { return k.Check == c && slices.Contains(ids, k.ID) })
	})
}

// Examine runs the checks on the node, for the findings of these ids; for all without ids.
// The worst findings come first.
func Examine(n *Node, ids ...string) []Finding {
	findings := []Finding{}
	for _, c := range checksOf(ids) {
		findings = append(findings, c.Find(n)...)
	}
	if len(ids) > 0 {
		findings = slices.DeleteFunc(findings, func(f Finding) bool { return !slices.Contains(ids, f.ID) })
	}
	for i := range findings {
		findings[i].Documentation = documentation(findings[i].ID)
		if findings[i].Object.Kind == "" {
			findings[i].Object.Kind = model.KindNode
		}
	}
	Sort(findings)
	return findings
}

// Sort puts the worst findings first.
func Sort(findings []Finding) {
	slices.SortStableFunc(findings, func(a, b Finding) int {
		return cmp.Compare(slices.Index(Severities, a.Severity), slices.Index(Severities, b.Severity))
	})
}

// percent formats a part of a whole, "-" for a whole of 0.
func percent(part, whole int) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

// names lists namespaces: the first few by name, the others by number.
func names(list []string) string {
	const shown = 4
	if len(list) <= shown+1 {
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:shown], ", "), len(list)-shown)
}

// grew formats a counter with its growth between the two readings.
func grew(name string, total, by uint64, n *Node) string {
	s := fmt.Sprintf("%s %d since this namespace was created", name, total)
	if n.Sampled > 0 {
		s += fmt.Sprintf(", %d of them in the last %.1f s", by, n.Sampled.Seconds())
	}
	return s
}

// sysctl returns the command that sets a sysctl in a namespace.
func sysctl(n conntrack.Namespace, name string, value any) string {
	return fmt.Sprintf("%ssysctl -w %s=%v", n.EnterCommand(), name, value)
}
