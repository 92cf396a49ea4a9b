package ebpf

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// serviceLabels are the labels of metrics of a Service port. Both families have one series.
var serviceLabels = []string{"namespace", "service", "port", "protocol"}

func serviceDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("spillway_service_"+name, help, slices.Concat(serviceLabels, labels), nil)
}

var (
	eventsDesc = prometheus.NewDesc("spillway_flow_events_total",
		"Flow events that the agent has received from the eBPF programs, by kind.", []string{"kind"}, nil)
	eventsLostDesc = prometheus.NewDesc("spillway_flow_events_lost_total",
		"Flow events that are missing because the kernel's ring or the agent's table of open flows was full. The agent gets too little CPU time, or --flow-events-rate allows too many.", nil, nil)
	eventsLeftOutDesc = prometheus.NewDesc("spillway_flow_events_left_out_total",
		"Flows, refusals and drops that were not reported because of --flow-events-sample or --flow-events-rate.", nil, nil)
	serviceConnectionsDesc = serviceDesc("connections_total", "Connections and UDP flows to a Service.")
	serviceActiveDesc      = serviceDesc("active_connections", "Open connections and UDP flows in the flow table at the last sweep.")
	serviceRefusedDesc     = serviceDesc("refused_total", "Packets and connections that the Service refuses: no endpoints, a source range, a Local policy.", "reason")
	serviceDroppedDesc     = serviceDesc("dropped_total", "Packets to the Service that were dropped, by reason.", "reason")
	serviceBytesDesc       = serviceDesc("bytes_total", "Bytes of translated packets, with IP headers.", "direction")
	servicePacketsDesc     = serviceDesc("packets_total", "Translated packets.", "direction")
	serviceHandshakeDesc   = serviceDesc("handshake_duration_seconds", "Time from a flow's first packet to the endpoint's answer.")
	servicesOmittedDesc    = prometheus.NewDesc("spillway_service_metrics_omitted",
		"Service ports without metrics of their own, because --service-metrics exports fewer.", nil, nil)
	serviceUncountedDesc = prometheus.NewDesc("spillway_service_metrics_uncounted_total",
		"Packets and connections that no Service's counters have, because the kernel's maps of counters are full.", nil, nil)

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
	xdpDesc = prometheus.NewDesc("spillway_ebpf_xdp_interfaces",
		"External interfaces by what runs the XDP program of --xdp: native (the driver), generic (the kernel) or none. The log has the reason.", []string{"mode"}, nil)
	carriersDesc = prometheus.NewDesc("spillway_ebpf_direct_endpoints",
		"Addresses of endpoints on other nodes behind Services with direct replies, by how packets tell their node about the Service. option: by an IP option. gue: within datagrams. none: new connections get SNAT. unknown: not probed yet.", []string{"carrier"}, nil)
	refusedDesc = prometheus.NewDesc("spillway_ebpf_refused_pod_addresses",
		"Addresses that pods of this node claim without success, by reason. No packets are sent to them. The log names the address and the interface.", []string{"reason"}, nil)
)

// Describe implements prometheus.Collector.
func (b *Backend) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{verdictsDesc, dropsDesc, flowsDesc, flowsMaxDesc, sweptDesc, interfacesDesc, xdpDesc, carriersDesc, refusedDesc,
		eventsDesc, eventsLostDesc, eventsLeftOutDesc, serviceConnectionsDesc, serviceActiveDesc, serviceRefusedDesc, serviceDroppedDesc, serviceBytesDesc,
		servicePacketsDesc, serviceHandshakeDesc, servicesOmittedDesc, serviceUncountedDesc, socketsEndedDesc} {
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
	b.collectEvents(ch)
	b.collectServices(ch)
	b.ends.collect(ch)
	b.carriers.collect(ch)
	refused := map[attach.Reason]int{}
	for _, r := range b.attacher.Refused() {
		refused[r.Reason]++
	}
	for _, r := range attach.Reasons() {
		ch <- prometheus.MustNewConstMetric(refusedDesc, prometheus.GaugeValue, float64(refused[r]), string(r))
	}
}

func (b *Backend) collectEvents(ch chan<- prometheus.Metric) {
	if b.cfg.FlowEvents == EventsOff {
		return
	}
	counts := b.FlowEventCounts()
	for _, kind := range dataplane.FlowEventKinds {
		ch <- prometheus.MustNewConstMetric(eventsDesc, prometheus.CounterValue, float64(counts.Received[kind]), kind.String())
	}
	ch <- prometheus.MustNewConstMetric(eventsLostDesc, prometheus.CounterValue, float64(counts.Lost))
	ch <- prometheus.MustNewConstMetric(eventsLeftOutDesc, prometheus.CounterValue, float64(counts.LeftOut))
}

// collectServices exports the counters of Services. Ports that differ only in their family
// are added up.
func (b *Backend) collectServices(ch chan<- prometheus.Metric) {
	all, err := b.ServiceCounters()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(serviceConnectionsDesc, err)
		return
	}
	if all == nil {
		return
	}
	all = withoutFamilies(all)
	top := topServices(all, b.cfg.ServiceMetricsTop)
	for _, id := range top {
		collectService(ch, id, all[id])
	}
	ch <- prometheus.MustNewConstMetric(servicesOmittedDesc, prometheus.GaugeValue, float64(len(all)-len(top)))
	uncounted := sumPerCPU(b.m(tcMapEventCounts), int(tcEventCountEVENT_COUNTS))[tcEventCountSERVICES_UNCOUNTED]
	ch <- prometheus.MustNewConstMetric(serviceUncountedDesc, prometheus.CounterValue, float64(uncounted))
}

func collectService(ch chan<- prometheus.Metric, id intent.PortID, c *dataplane.ServiceCounters) {
	port := id.Port
	if port == "" {
		port = strconv.Itoa(int(id.Number))
	}
	labels := []string{id.Service.Namespace, id.Service.Name, port, id.Protocol.String()}
	counter := func(desc *prometheus.Desc, n uint64, more ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), slices.Concat(labels, more)...)
	}
	counter(serviceConnectionsDesc, c.Connections)
	ch <- prometheus.MustNewConstMetric(serviceActiveDesc, prometheus.GaugeValue, float64(c.Active), labels...)
	for reason, n := range c.Refused {
		counter(serviceRefusedDesc, n, reason)
	}
	for reason, n := range c.Dropped {
		counter(serviceDroppedDesc, n, reason)
	}
	counter(serviceBytesDesc, c.BytesToEndpoint, "to_endpoint")
	counter(serviceBytesDesc, c.BytesToClient, "to_client")
	counter(servicePacketsDesc, c.PacketsToEndpoint, "to_endpoint")
	counter(servicePacketsDesc, c.PacketsToClient, "to_client")
	buckets, sum := map[float64]uint64{}, uint64(0)
	for i, n := range c.Handshakes {
		sum += n
		if i < len(c.Handshakes)-1 {
			buckets[float64(uint64(1)<<i)/1000] = sum
		}
	}
	ch <- prometheus.MustNewConstHistogram(serviceHandshakeDesc, sum, c.HandshakeSum.Seconds(), buckets, labels...)
}

// withoutFamilies adds up the ports of a dual-stack Service, under IPv4.
func withoutFamilies(all map[intent.PortID]*dataplane.ServiceCounters) map[intent.PortID]*dataplane.ServiceCounters {
	out := map[intent.PortID]*dataplane.ServiceCounters{}
	for id, c := range all {
		id.Family = model.IPv4
		if out[id] == nil {
			out[id] = c
			continue
		}
		out[id].Add(c)
	}
	return out
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
