// Package scale is the experiment sync-scale: the cost of a change in clusters of more
// and more Services. lab/experiment/change measures it.
package scale

import (
	"context"
	"fmt"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/change"
	"spillway.dev/spillway/lab/experiment/harness"
)

// side is a mode of lab/experiment/change and its name.
type side struct{ mode, name string }

var sides = []side{
	{"ebpf", "Spillway, eBPF"},
	{"nftables", "Spillway, nftables"},
	{"iptables-legacy", "Spillway, iptables (legacy)"},
	{"kube-proxy-nftables", "kube-proxy, nftables"},
	{"kube-proxy-iptables-legacy", "kube-proxy, iptables (legacy)"},
}

// New returns the experiment.
func New() experiment.Experiment {
	return experiment.Experiment{
		Name:  "sync-scale",
		Title: "What one change costs in a large cluster",
		Question: "One endpoint of one Service changes. How long does it take until the kernel knows, how much CPU does it cost, " +
			"and does a connection's first packet take longer, in clusters of more and more Services?",
		Published: "At 5,000 nodes, the median of network programming fell from 27 s to 13 s to 5 s when kube-proxy's iptables mode left " +
			"unchanged chains out of iptables-restore. That counts from the API's write to the last node, with min-sync-period among it: " +
			"so do the rows \"API to packet\" here; the others count the sync alone.",
		Sources: []experiment.Source{
			{Title: "KEP-3453: minimizing iptables-restore input size",
				URL: "https://github.com/kubernetes/enhancements/tree/master/keps/sig-network/3453-minimize-iptables-restore"},
		},
		Packages: map[string]string{"nginx": "nginx-light", "nft": "nftables", "iptables-restore": "iptables"},
		Figures: []experiment.Figure{
			{Key: "arrives", Name: "API to packet", Unit: "ms", Better: "lower"},
			{Key: "change", Name: "change", Unit: "ms", Better: "lower"},
			{Key: "change99", Name: "p99", Unit: "ms", Better: "lower"},
			{Key: "cpu", Name: "CPU a change", Unit: "ms", Better: "lower"},
			{Key: "cpu_api", Name: "CPU a change, API to packet", Unit: "ms", Better: "lower"},
			{Key: "cold", Name: "first sync", Unit: "s", Better: "lower"},
			{Key: "full", Name: "full sync again", Unit: "s", Better: "lower"},
			{Key: "first", Name: "first packet ÷ 10 Services", Better: "lower"},
			{Key: "rss", Name: "memory", Unit: "MiB", Better: "lower"},
		},
		Charts: []experiment.Chart{
			{Kind: experiment.Bars, Title: "From the API to the first packet", Figure: "arrives", Group: "API to packet"},
			{Kind: experiment.Lines, Title: "One change", Figure: "change", XName: "Services", LogX: true, LogY: true},
			{Kind: experiment.Lines, Title: "First sync of everything", Figure: "cold", XName: "Services", LogX: true, LogY: true},
			{Kind: experiment.Lines, Title: "CPU of one change", Figure: "cpu", XName: "Services", LogX: true, LogY: true},
		},
		Scale:    describe,
		Rows:     rows,
		Conclude: conclude,
		Card:     card,
	}
}

func sizes(o experiment.Options) []int {
	if o.Quick {
		return []int{100, 1000}
	}
	return []int{100, 1000, 5000, 10000, 50000}
}

// changes returns the number of measured changes: fewer if each takes long, so that all
// rows fit into 40 minutes.
func changes(o experiment.Options, mode string, n int) int {
	switch {
	case strings.HasPrefix(mode, "kube-proxy") && o.Quick:
		return 6 // each is waited for with patience
	case strings.HasPrefix(mode, "kube-proxy"):
		return 12
	case o.Quick:
		return 30
	case strings.HasPrefix(mode, "iptables") && n > 10000:
		return 20
	case strings.HasPrefix(mode, "iptables") && n > 1000:
		return 50
	}
	return 100
}

// peerLimit is the largest cluster for kube-proxy. Each change there takes seconds in
// iptables mode.
const peerLimit = 5000

func describe(o experiment.Options) string {
	return fmt.Sprintf("%d endpoints a Service, one node. Spillway is given the change by its own source's next step. kube-proxy lists "+
		"and watches it on a server of the lab, "+
		"which takes the place of kube-apiserver and etcd, up to %d Services. kube-proxy's times are those of its own metrics, with a "+
		"minimum sync period "+
		"of 0 in iptables mode. One sample is one change. Rows \"API to packet\" hold the server's event, the proxy's informers, its sync "+
		"and a connection. Their CPU is the "+
		"proxy's, for as long as the row lasts.",
		change.Endpoints, peerLimit)
}

func rows(o experiment.Options) []experiment.Row {
	var out []experiment.Row
	for _, s := range sides {
		for _, n := range sizes(o) {
			peer := strings.HasPrefix(s.mode, "kube-proxy")
			if peer && (n > peerLimit || o.Quick && n < 1000) {
				continue
			}
			row := experiment.Row{Name: fmt.Sprintf("%s: %d Services", s.name, n), Group: s.name, X: float64(n),
				Takes: takes(o, s.mode, n),
				Run:   func(ctx context.Context, m *experiment.Measurement) error { return run(ctx, o, s.mode, n, m) },
			}
			if peer {
				row.Needs = harness.NeedKubeProxy
			} else {
				row.Side = experiment.Spillway
			}
			out = append(out, row)
		}
	}
	for _, a := range arrivals(o) {
		out = append(out, a.row(o))
	}
	return out
}

// takes returns the approximate duration of a row on two cores.
func takes(o experiment.Options, mode string, n int) time.Duration {
	services := func(each time.Duration) time.Duration { return time.Duration(n) * each }
	switch {
	case strings.HasPrefix(mode, "kube-proxy") && o.Quick:
		return 5*time.Second + services(4*time.Millisecond)
	case strings.HasPrefix(mode, "kube-proxy"):
		return 12*time.Second + services(8*time.Millisecond)
	case o.Quick:
		return time.Second + services(time.Millisecond/2)
	case strings.HasPrefix(mode, "iptables"):
		return 6*time.Second + services(1200*time.Microsecond)
	}
	return 6*time.Second + services(500*time.Microsecond)
}

func run(ctx context.Context, o experiment.Options, mode string, n int, m *experiment.Measurement) error {
	cfg := change.Config{Name: o.Name + "-sync", Modes: []string{mode}, Services: []int{n}, Changes: changes(o, mode, n),
		Rounds: 8, Progress: o.Progress}
	// A second cluster for first packets takes as long again, and 10 against 100 Services
	// show little.
	cfg.ChangesOnly = o.Quick || n < 1000
	report, err := change.Run(ctx, cfg)
	if err != nil {
		return err
	}
	row := report.Rows[0]
	for _, ms := range row.Batch.Millis {
		m.Add("change", ms)
	}
	m.Add("change99", row.Batch.Percentile(0.99))
	m.Add("cpu", row.Batch.CPU)
	m.Add("cold", row.Cold.Seconds)
	if row.Batch.Full > 0 {
		m.Add("full", row.Batch.Full)
	}
	if row.FirstPacket.N > 0 {
		m.Add("first", row.FirstPacket.Median)
	}
	m.Add("rss", row.Batch.RSS)
	return nil
}

// conclude compares the smallest with the largest size that both have.
func conclude(res *experiment.Result) []string {
	var parts []string
	for _, s := range sides {
		var low, high *experiment.RowResult
		for i := range res.Rows {
			row := &res.Rows[i]
			if _, ok := row.Value("change"); !ok || row.Group != s.name {
				continue
			}
			if low == nil || row.X < low.X {
				low = row
			}
			if high == nil || row.X > high.X {
				high = row
			}
		}
		if low == nil || low == high {
			continue
		}
		a, b := low.Values["change"].Median, high.Values["change"].Median
		parts = append(parts, fmt.Sprintf("%s %s ms at %.0f and %s ms at %.0f Services", s.name,
			experiment.FormatNumber(a), low.X, experiment.FormatNumber(b), high.X))
	}
	var out []string
	if len(parts) > 0 {
		out = append(out, "Measured, median of a change: "+strings.Join(parts, "; ")+".")
	}
	return append(out, "Beside the published figures: those are of a whole cluster of 5,000 nodes, from the API server to the last node, "+
		"and kube-proxy "+
		"has had the improvement since 1.27. A sync is the part of it that grows with the number of Services. kube-proxy's changes go "+
		"through its informers, "+
		"whose time is not in its metric of a sync.")
}
