package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
	"spillway.dev/spillway/internal/node/conntrack/stale"
	"spillway.dev/spillway/internal/observe/otlp"
	"spillway.dev/spillway/internal/observe/server"
	"spillway.dev/spillway/internal/telemetry"
)

// metricGroup is a section of the page.
type metricGroup struct {
	title, about string
	has          func(name string) bool
}

func prefix(list ...string) func(string) bool {
	return func(name string) bool {
		return slices.ContainsFunc(list, func(p string) bool { return strings.HasPrefix(name, p) })
	}
}

// metricGroups lists the sections. A metric is in the first one that has it.
var metricGroups = []metricGroup{
	{"API server", "kube-proxy's names, and Spillway's own.", prefix("rest_client_", "spillway_api_server_", "spillway_events_")},
	{"iptables dataplane", "Only with `--proxy-mode iptables`.", prefix("kubeproxy_sync_proxy_rules_iptables_", "spillway_iptables_")},
	{"nftables dataplane", "With `--proxy-mode nftables`, and with `ebpf` for the ports that eBPF cannot serve.",
		prefix("spillway_nftables_", "kubeproxy_sync_proxy_rules_nftables_")},
	{"Flow events and traffic of Services", "Only with `--proxy-mode ebpf`. The metrics by Service need `--service-metrics`, those of " +
		"events `--flow-events` ([flow events](flow-events.md)). Packets and bytes by Service need `--service-metrics all` or `top-N`.",
		prefix("spillway_flow_events_", "spillway_service_connections_", "spillway_service_active_", "spillway_service_refused_",
			"spillway_service_dropped_",
			"spillway_service_bytes_", "spillway_service_packets_", "spillway_service_handshake_", "spillway_service_metrics_")},
	{"Services and syncs", "kube-proxy's names, and Spillway's own.",
		prefix("kubeproxy_", "kubernetes_", "spillway_service_", "spillway_services_", "spillway_unsupported_", "spillway_ejected_endpoints",
			"spillway_problems", "spillway_sync_", "spillway_cleanup_", "spillway_audit_", "spillway_build_")},
	{"Findings", "[What they mean](findings.md). Labels never name an object.", prefix("spillway_findings")},
	{"Pods' connections to the outside", "Only with `--proxy-mode nftables`.", prefix("spillway_egress_")},
	{"Do-not-track policies", "", prefix("spillway_do_not_track_")},
	{"eBPF dataplane", "Only with `--proxy-mode ebpf`.", prefix("spillway_ebpf_", "spillway_sockets_ended_")},
	{"Conntrack autopilot", "Not with `--conntrack-autopilot off`.", prefix("spillway_conntrack_autopilot_")},
	{"Conntrack", "node_exporter's names, and Spillway's own. `netns` is a network namespace; 128 have series of their own, and " +
		"`(others)` adds up the rest.", prefix("node_nf_conntrack_", "spillway_conntrack_")},
	{"OpenTelemetry", "Only with `--otlp-endpoint`.", prefix("spillway_otlp_")},
	{"InfluxDB", "Only with `--influx-url`.", prefix("spillway_influx_")},
}

// metric is one that the agent exports.
type metric struct{ name, help, labels string }

// kind returns the type of a metric. test/controlplane compares it with a running agent.
func (m metric) kind() string {
	switch {
	case strings.HasPrefix(m.name, "node_nf_conntrack_"), // as node_exporter's
		m.name == "kubeproxy_sync_proxy_rules_no_local_endpoints_total", // as kube-proxy's
		m.name == "kubeproxy_sync_proxy_rules_iptables_total":
		return "gauge"
	case strings.HasSuffix(m.name, "_duration_seconds"):
		return "histogram"
	case strings.HasSuffix(m.name, "_total"):
		return "counter"
	}
	return "gauge"
}

// head returns the first cell of a metric's row.
func (m metric) head() string {
	head := code(m.name) + "<br>" + m.kind()
	if m.labels != "" {
		head += ", by " + code(m.labels)
	}
	return head
}

func metricsPage(root string) ([]byte, error) {
	w := page("the agent's collectors and bpf/abi.h", "Metrics")
	w.WriteString("The agent serves these at `/metrics` of `--metrics-bind-address`. The metrics `go_*`,\n" +
		"`process_*` and `promhttp_*` of the Go client library are not listed. [Metrics of kube-proxy that\n" +
		"are missing](../how-to/monitor-in-kube-proxys-place.md#metrics-that-are-missing).\n\n")
	all, err := metrics()
	if err != nil {
		return nil, err
	}
	for _, g := range metricGroups {
		rows := [][]string{{"metric, type and labels", "meaning"}}
		all = slices.DeleteFunc(all, func(m metric) bool {
			if g.has(m.name) {
				rows = append(rows, []string{m.head(), cell(m.help)})
			}
			return g.has(m.name)
		})
		fmt.Fprintf(w, "## %s\n\n", g.title)
		if g.about != "" {
			fmt.Fprintf(w, "%s\n\n", g.about)
		}
		table(w, rows...)
	}
	if len(all) > 0 {
		return nil, fmt.Errorf("%s is in no group of hack/reference/metrics.go: add it to one", all[0].name)
	}
	if err := writeVerdicts(w, filepath.Join(root, "bpf/abi.h")); err != nil {
		return nil, err
	}
	return end(w), nil
}

// metrics lists what the agent registers, by name.
func metrics() (list []metric, err error) {
	own, ok := telemetry.NewMetrics(telemetry.Build{}).Gatherer().(prometheus.Collector)
	if !ok {
		return nil, fmt.Errorf("the agent's registry does not describe its metrics")
	}
	influx, err := telemetry.NewInflux(telemetry.InfluxConfig{
		URL: "http://influx.example:8086/write?db=metrics", Interval: time.Second,
		Gatherer: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	export, err := otlp.New(otlp.Config{Endpoint: "http://127.0.0.1:4318"})
	if err != nil {
		return nil, err
	}
	collectors := []prometheus.Collector{
		own, influx, export, new(ebpf.Backend), new(nftables.Backend), new(nftables.Policies), new(iptables.Backend),
		conntrack.NewCollector(), conntrack.NewNamespaceCollector(nil), new(autopilot.Pilot), new(stale.Reconciler),
		server.NewFindings(nil),
	}
	collectors = append(collectors, kube.RequestCollectors()...)
	collectors = append(collectors, new(kube.ServerMonitor).Collectors()...)
	collectors = append(collectors, new(kube.Source).Collectors()...)
	collectors = append(collectors, kube.NewEvents(nil, "", nil, nil).Collectors()...)
	for _, c := range collectors {
		descs := make(chan *prometheus.Desc)
		go func() { c.Describe(descs); close(descs) }()
		for d := range descs {
			m, parseErr := parseDesc(d)
			if parseErr != nil {
				err = parseErr
			} else if !strings.HasPrefix(m.name, "go_") && !strings.HasPrefix(m.name, "process_") {
				list = append(list, m)
			}
		}
	}
	slices.SortFunc(list, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return list, err
}

// description matches a Desc as a string: the package has no other access to its parts.
var description = regexp.MustCompile(`^Desc\{fqName: ("[^"]+"), help: ("(?:[^"\\]|\\.)*"), unit: "[^"]*", constLabels: \{.*\}, variableLabels: \{(.*)\}\}$`)

func parseDesc(d *prometheus.Desc) (metric, error) {
	m := description.FindStringSubmatch(d.String())
	if m == nil {
		return metric{}, fmt.Errorf("%s: not the form of a description that is known here", d)
	}
	name, err := strconv.Unquote(m[1])
	if err != nil {
		return metric{}, err
	}
	help, err := strconv.Unquote(m[2])
	return metric{name: name, help: help, labels: strings.ReplaceAll(m[3], ",", ", ")}, err
}

// verdict matches a value of enum verdict with its comment.
var verdict = regexp.MustCompile(`(?m)^\t([A-Z_]+)(?: = 0)?,[ \t]*(?:/\* (.*) \*/)?$`)

// writeVerdicts writes the values of the labels verdict and reason, from the enum in C.
func writeVerdicts(w *bytes.Buffer, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	_, after, _ := strings.Cut(string(text), "\nenum verdict {\n")
	enum, _, ok := strings.Cut(after, "\tVERDICTS,\n};")
	if !ok {
		return fmt.Errorf("%s: enum verdict is not found", path)
	}
	verdicts, drops := [][]string{{"verdict", "meaning"}}, [][]string{{"reason", "meaning"}}
	for line := range strings.Lines(enum) {
		m := verdict.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil || m[2] == "" {
			return fmt.Errorf("%s: %q has no comment on its line", path, strings.TrimSpace(line))
		}
		name := strings.ToLower(m[1])
		if reason, drop := strings.CutPrefix(name, "drop_"); drop {
			drops = append(drops, []string{code(reason), cell(m[2])})
		} else {
			verdicts = append(verdicts, []string{code(name), cell(m[2])})
		}
	}
	w.WriteString("## Reasons of drops\n\nValues of `reason` of `spillway_ebpf_drops_total`. `policy_local`, `source_range` " +
		"and\n`rejected_silent` are configured drops.\n\n")
	table(w, drops...)
	w.WriteString("## Verdicts\n\nValues of `verdict` of `spillway_ebpf_verdicts_total`.\n\n")
	table(w, verdicts...)
	return nil
}
