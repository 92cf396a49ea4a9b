package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
)

// silentCheck looks for time-outs that keep entries long after their flows.
type silentCheck struct{}

func (silentCheck) Name() string  { return "time-outs and flows" }
func (silentCheck) About() string { return "entries that wait long after their last packet" }

// pauses are how long flows of a kind pause at most, by the time-out's name: an
// entry that has been silent for longer most likely belongs to a flow that is
// over. They are good values for the time-outs too.
var pauses = map[string]time.Duration{
	"udp": 10 * time.Second, "udp_stream": 30 * time.Second,
	"tcp_syn_sent": 20 * time.Second, "tcp_time_wait": 30 * time.Second, "tcp_fin_wait": 30 * time.Second,
	"tcp_last_ack": 30 * time.Second, "tcp_close_wait": 60 * time.Second,
	"tcp_established": 24 * time.Hour, // kube-proxy's choice
	"icmp":            5 * time.Second, "icmpv6": 5 * time.Second,
}

// Parts of a table that silent entries of one kind take before it is said, and
// before it matters.
const (
	someSilent = 0.05
	muchSilent = 0.25
)

func (silentCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		f := Finding{ID: "timeouts-long", Severity: Info, Namespace: ns.Namespace.String(), Numbers: map[string]float64{}}
		set := map[string]time.Duration{}
		freed := 0
		for _, name := range slices.Sorted(maps.Keys(ns.States)) {
			s, timeout := ns.States[name], ns.Limits.Timeouts[name]
			part := float64(s.Silent) / float64(max(ns.Limits.Max, 1))
			if part < someSilent || 2*s.Silent < s.Entries || timeout <= pauses[name] {
				continue
			}
			if part >= muchSilent {
				f.Severity = Warning
			}
			set[name] = pauses[name]
			freed += s.Silent
			f.Evidence = append(f.Evidence, fmt.Sprintf("%s: %d entries, %d of them silent for more than %v; the time-out is %v", name, s.Entries, s.Silent, pauses[name], timeout))
			f.Numbers[name+"_entries"], f.Numbers[name+"_silent"], f.Numbers[name+"_timeout_seconds"] = float64(s.Entries), float64(s.Silent), timeout.Seconds()
		}
		if len(set) == 0 {
			continue
		}
		f.Title = fmt.Sprintf("%s of the table wait for flows that are over", percent(freed, ns.Limits.Max))
		f.Packets = "Entries without packets take the room of new connections: the table carries fewer of them a second than it could (spillway plan)."
		f.Mend = fmt.Sprintf("Shorten the time-outs: about %d entries fewer. --fix never shortens one: only you know flows that pause for longer.", freed)
		f.Commands = []string{setTimeouts(ns.Namespace, set)}
		if !ns.Namespace.Own {
			f.Settings = podSettings(set)
		}
		out = append(out, f)
	}
	return out
}

// setTimeouts is the command that sets time-outs in a namespace.
func setTimeouts(n conntrack.Namespace, set map[string]time.Duration) string {
	var args []string
	for _, name := range slices.Sorted(maps.Keys(set)) {
		args = append(args, fmt.Sprintf("%s=%.0f", conntrack.TimeoutSysctl(name), set[name].Seconds()))
	}
	return n.EnterCommand() + "sysctl -w " + strings.Join(args, " ")
}

// podSettings gives the time-outs to pods that are made from now on: what a pod
// asks for, and the kubelet's leave to ask.
func podSettings(set map[string]time.Duration) string {
	var b strings.Builder
	b.WriteString("# KubeletConfiguration of the node; restart the kubelet\nallowedUnsafeSysctls:\n- \"net.netfilter.nf_conntrack_*\"\n")
	b.WriteString("# Pod (in a Deployment: spec.template.spec)\nspec:\n  securityContext:\n    sysctls:\n")
	for _, name := range slices.Sorted(maps.Keys(set)) {
		fmt.Fprintf(&b, "    - name: %s\n      value: \"%.0f\"\n", conntrack.TimeoutSysctl(name), set[name].Seconds())
	}
	return b.String()
}
