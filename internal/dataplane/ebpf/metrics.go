package ebpf

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/dsr"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

var (
	verdictsDesc = prometheus.NewDesc("spillway_ebpf_verdicts_total",
		"Packets and socket calls, by verdict of the eBPF programs.", []string{"verdict"}, nil)
	dropsDesc = prometheus.NewDesc("spillway_ebpf_drops_total",
		"Packets dropped by the eBPF programs, by reason.", []string{"reason"}, nil)
	interfacesDesc = prometheus.NewDesc("spillway_ebpf_interfaces",
		"Interfaces by role and by whether all programs are attached.", []string{"role", "attached"}, nil)
	xdpDesc = prometheus.NewDesc("spillway_ebpf_xdp_interfaces",
		"External interfaces by what runs the XDP program of --xdp: native (the driver), generic (the kernel) or none. The log has the reason.",
		[]string{"mode"}, nil)
	refusedDesc = prometheus.NewDesc("spillway_ebpf_refused_pod_addresses",
		"Addresses that pods of this node announce without success, by reason. No packets are sent to them. The log names the address and the "+
			"interface.", []string{"reason"}, nil)
)

// Describe implements prometheus.Collector.
func (b *Backend) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{verdictsDesc, dropsDesc, interfacesDesc, xdpDesc, dsr.EncapsulationsDesc, refusedDesc} {
		ch <- d
	}
	b.flows.Describe(ch)
}

// Collect implements prometheus.Collector.
func (b *Backend) Collect(ch chan<- prometheus.Metric) {
	for name, n := range b.Verdicts() {
		if reason, ok := strings.CutPrefix(name, "drop_"); ok {
			ch <- prometheus.MustNewConstMetric(dropsDesc, prometheus.CounterValue, float64(n), reason)
			continue
		}
		ch <- prometheus.MustNewConstMetric(verdictsDesc, prometheus.CounterValue, float64(n), name)
	}
	b.flows.Collect(ch)
	b.collectInterfaces(ch)
	b.encapsulations.Collect(ch)
	refused := map[attach.Reason]int{}
	for _, r := range b.attacher.Refused() {
		refused[r.Reason]++
	}
	for _, r := range attach.Reasons() {
		ch <- prometheus.MustNewConstMetric(refusedDesc, prometheus.GaugeValue, float64(refused[r]), string(r))
	}
}

func (b *Backend) collectInterfaces(ch chan<- prometheus.Metric) {
	counts := map[[2]string]int{}
	modes := map[string]int{}
	for _, s := range b.attacher.Status() {
		if s.XDP != "" {
			mode, _, _ := strings.Cut(s.XDP, ":")
			modes[mode]++
		}
		attached := "true"
		if s.Err != nil {
			attached = "false"
		}
		counts[[2]string{s.Role.String(), attached}]++
	}
	for labels, n := range counts {
		ch <- prometheus.MustNewConstMetric(interfacesDesc, prometheus.GaugeValue, float64(n), labels[0], labels[1])
	}
	for mode, n := range modes {
		ch <- prometheus.MustNewConstMetric(xdpDesc, prometheus.GaugeValue, float64(n), mode)
	}
}

// Verdicts returns the programs' counters, summed over all CPUs, by name: enum verdict
// of bpf/abi.h in lower case.
func (b *Backend) Verdicts() map[string]uint64 {
	return objects.SumVerdicts(b.m(objects.TCMapVerdicts), b.objects.Verdicts)
}
