package ebpf

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
)

var (
	verdictsDesc = prometheus.NewDesc("spillway_ebpf_verdicts_total",
		"Packets and socket calls, by verdict of the eBPF programs.", []string{"verdict"}, nil)
	dropsDesc = prometheus.NewDesc("spillway_ebpf_drops_total",
		"Packets dropped by the eBPF programs, by reason.", []string{"reason"}, nil)
	flowsDesc = prometheus.NewDesc("spillway_ebpf_flows",
		"Flows in the flow table at the last sweep.", []string{"protocol"}, nil)
	flowsMaxDesc = prometheus.NewDesc("spillway_ebpf_flows_max",
		"Capacity of the flow table, in confirmed flows; beyond it the kernel evicts the oldest.", nil, nil)
	sweptDesc = prometheus.NewDesc("spillway_ebpf_flows_swept_total",
		"Flows removed after their timeout.", nil, nil)
	interfacesDesc = prometheus.NewDesc("spillway_ebpf_interfaces",
		"Interfaces by role and by whether all programs are attached.", []string{"role", "attached"}, nil)
	refusedDesc = prometheus.NewDesc("spillway_ebpf_refused_pod_addresses",
		"Addresses that pods of this node claim without success, by reason. No packets are sent to them. The log names the address and the interface.", []string{"reason"}, nil)
)

// Describe implements prometheus.Collector.
func (b *Backend) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{verdictsDesc, dropsDesc, flowsDesc, flowsMaxDesc, sweptDesc, interfacesDesc, refusedDesc} {
		ch <- d
	}
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
	ch <- prometheus.MustNewConstMetric(flowsDesc, prometheus.GaugeValue, float64(b.flows.tcp.Load()), "tcp")
	ch <- prometheus.MustNewConstMetric(flowsDesc, prometheus.GaugeValue, float64(b.flows.udp.Load()), "udp")
	ch <- prometheus.MustNewConstMetric(flowsMaxDesc, prometheus.GaugeValue, float64(b.cfg.FlowTableSize))
	ch <- prometheus.MustNewConstMetric(sweptDesc, prometheus.CounterValue, float64(b.flows.swept.Load()))
	b.collectInterfaces(ch)
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
	for _, s := range b.attacher.Status() {
		attached := "true"
		if s.Err != nil {
			attached = "false"
		}
		counts[[2]string{s.Role.String(), attached}]++
	}
	for labels, n := range counts {
		ch <- prometheus.MustNewConstMetric(interfacesDesc, prometheus.GaugeValue, float64(n), labels[0], labels[1])
	}
}

// Verdicts returns the programs' counters, summed over all CPUs, by name: enum verdict
// of bpf/abi.h in lower case.
func (b *Backend) Verdicts() map[string]uint64 {
	return sumVerdicts(b.m(tcMapVerdicts), b.objects.verdicts)
}

func sumVerdicts(m *ebpf.Map, names []string) map[string]uint64 {
	out := make(map[string]uint64, len(names))
	var perCPU []uint64
	for i, name := range names {
		if err := m.Lookup(uint32(i), &perCPU); err != nil {
			continue
		}
		for _, n := range perCPU {
			out[name] += n
		}
	}
	return out
}

// PinnedVerdicts returns the Verdicts of the instance pinned in a directory, even if
// its agent does not run. The error is os.ErrNotExist if there is none.
func PinnedVerdicts(bpffs string) (map[string]uint64, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(mapsDir(bpffs), tcMapVerdicts), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open counters in %s: %w", bpffs, err)
	}
	defer m.Close()
	spec, err := loadTc()
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects: %w", err)
	}
	names, err := verdictNames(spec)
	if err != nil {
		return nil, err
	}
	return sumVerdicts(m, names), nil
}
