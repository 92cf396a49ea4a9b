package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
)

// timeoutsLong reports timeouts that keep entries long after their flows have ended.
type timeoutsLong struct{}

func (timeoutsLong) Name() string  { return "timeouts of entries" }
func (timeoutsLong) About() string { return "entries that stay long after their last packet" }

// pauses are the longest usual pauses within a flow, by the name of the timeout. The
// flow of an entry that was silent for longer has most likely ended. The values are
// also good timeouts.
var pauses = map[string]time.Duration{
	"udp": 10 * time.Second, "udp_stream": 30 * time.Second,
	"tcp_syn_sent": 20 * time.Second, "tcp_time_wait": 30 * time.Second, "tcp_fin_wait": 30 * time.Second,
	"tcp_last_ack": 30 * time.Second, "tcp_close_wait": 60 * time.Second,
	"tcp_established": 24 * time.Hour, // kube-proxy's choice
	"icmp":            5 * time.Second, "icmpv6": 5 * time.Second,
}

// Shares of a table that silent entries of one kind take before doctor reports them
// (someSilent), and before it warns (muchSilent).
const (
	someSilent = 0.05
	muchSilent = 0.25
)

func (timeoutsLong) Find(n *Node) []Finding {
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
			f.Evidence = append(f.Evidence, fmt.Sprintf("%s: %d entries, %d of them silent for more than %v; the timeout is %v", name, s.Entries,
				s.Silent, pauses[name], timeout))
			f.Numbers[name+"_entries"], f.Numbers[name+"_silent"], f.Numbers[name+"_timeout_seconds"] = float64(s.Entries),
				float64(s.Silent), timeout.Seconds()
		}
		if len(set) == 0 {
			continue
		}
		f.Title = fmt.Sprintf("the table carries fewer connections than it could: %s of it holds flows that have ended",
			percent(freed, ns.Limits.Max))
		f.Packets = "A full table drops new connections, and idle entries take their space (spillway plan shows the rate that the table carries)."
		f.Remedy = fmt.Sprintf("Shorten the timeouts: the same load then takes about %d entries fewer. Existing entries keep their deadline "+
			"until their next packet. --fix never shortens one: only you know the flows that pause for longer.", freed)
		f.Commands = []string{setTimeouts(ns.Namespace, set)}
		if !ns.Namespace.Own {
			f.Settings = podSettings(set)
		}
		out = append(out, f)
	}
	return out
}

// setTimeouts returns the command that sets timeouts in a namespace.
func setTimeouts(n conntrack.Namespace, set map[string]time.Duration) string {
	var args []string
	for _, name := range slices.Sorted(maps.Keys(set)) {
		args = append(args, fmt.Sprintf("%s=%.0f", conntrack.TimeoutSysctl(name), set[name].Seconds()))
	}
	return n.EnterCommand() + "sysctl -w " + strings.Join(args, " ")
}

// podSettings returns the YAML that sets the timeouts in new pods: the sysctls of the
// pod, and the kubelet's permission for them.
func podSettings(set map[string]time.Duration) string {
	var b strings.Builder
	b.WriteString("# KubeletConfiguration of the node; restart the kubelet\nallowedUnsafeSysctls:\n- \"net.netfilter.nf_conntrack_*\"\n")
	b.WriteString("# Pod (in a Deployment: spec.template.spec)\nspec:\n  securityContext:\n    sysctls:\n")
	for _, name := range slices.Sorted(maps.Keys(set)) {
		fmt.Fprintf(&b, "    - name: %s\n      value: \"%.0f\"\n", conntrack.TimeoutSysctl(name), set[name].Seconds())
	}
	return b.String()
}
