package flows

import (
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

var (
	eventsDesc = prometheus.NewDesc("spillway_flow_events_total",
		"Flow events that the agent has received from the eBPF programs, by kind.", []string{"kind"}, nil)
	eventsLostDesc = prometheus.NewDesc("spillway_flow_events_lost_total",
		"Flow events that are missing because the kernel's ring or the agent's table of open flows was full. The agent gets too little CPU "+
			"time, or --flow-events-rate allows too many.", nil, nil)
	eventsLeftOutDesc = prometheus.NewDesc("spillway_flow_events_left_out_total",
		"Flows, refusals and drops that were not reported because of --flow-events-sample or --flow-events-rate.", nil, nil)
	serviceConnectionsDesc = serviceDesc("connections_total", "Connections and UDP flows to a Service.")
	serviceActiveDesc      = serviceDesc("active_connections", "Open connections and UDP flows in the flow table at the last sweep.")
	serviceRefusedDesc     = serviceDesc("refused_total",
		"Packets and connections that the Service refuses: no endpoints, a source range, a Local policy.", "reason")
	serviceDroppedDesc   = serviceDesc("dropped_total", "Packets to the Service that were dropped, by reason.", "reason")
	serviceBytesDesc     = serviceDesc("bytes_total", "Bytes of translated packets, with IP headers.", "direction")
	servicePacketsDesc   = serviceDesc("packets_total", "Translated packets.", "direction")
	serviceHandshakeDesc = serviceDesc("handshake_duration_seconds", "Time from a flow's first packet to the endpoint's answer.")
	servicesOmittedDesc  = prometheus.NewDesc("spillway_service_metrics_omitted",
		"Service ports without metrics of their own, because --service-metrics exports fewer.", nil, nil)
	serviceUncountedDesc = prometheus.NewDesc("spillway_service_metrics_uncounted_total",
		"Packets and connections that no Service's counters have, because the kernel's maps of counters are full.", nil, nil)

	flowsDesc = prometheus.NewDesc("spillway_ebpf_flows",
		"Flows in the flow table at the last sweep.", []string{"protocol"}, nil)
	flowsMaxDesc = prometheus.NewDesc("spillway_ebpf_flows_max",
		"Capacity of the flow table, in confirmed flows; beyond it the kernel evicts the oldest.", nil, nil)
	egressDesc = prometheus.NewDesc("spillway_ebpf_egress_connections",
		"Pods' connections, UDP flows and pings to the outside with the node's address, at the last sweep.", nil, nil)
	egressPortsDesc = prometheus.NewDesc("spillway_ebpf_egress_ports",
		"Connections of one protocol that one destination outside can have, from one address of the node.", nil, nil)
	egressBusiestDesc = prometheus.NewDesc("spillway_ebpf_egress_busiest_destination_connections",
		"Connections to the destination outside that has the most, at the last sweep. The doctor names it.", nil, nil)
	sweptDesc = prometheus.NewDesc("spillway_ebpf_flows_swept_total",
		"Flows removed after their timeout.", nil, nil)
)

// Describe implements prometheus.Collector.
func (t *Table) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{flowsDesc, flowsMaxDesc, sweptDesc, egressDesc, egressPortsDesc, egressBusiestDesc,
		eventsDesc, eventsLostDesc, eventsLeftOutDesc, serviceConnectionsDesc, serviceActiveDesc, serviceRefusedDesc,
		serviceDroppedDesc, serviceBytesDesc,
		servicePacketsDesc, serviceHandshakeDesc, servicesOmittedDesc, serviceUncountedDesc, socketsEndedDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (t *Table) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(flowsDesc, prometheus.GaugeValue, float64(t.counts.tcp.Load()), "tcp")
	ch <- prometheus.MustNewConstMetric(flowsDesc, prometheus.GaugeValue, float64(t.counts.udp.Load()), "udp")
	ch <- prometheus.MustNewConstMetric(flowsDesc, prometheus.GaugeValue, float64(t.counts.icmp.Load()), "icmp")
	ch <- prometheus.MustNewConstMetric(flowsMaxDesc, prometheus.GaugeValue, float64(t.cfg.FlowTableSize))
	ch <- prometheus.MustNewConstMetric(sweptDesc, prometheus.CounterValue, float64(t.counts.swept.Load()))
	t.collectEgress(ch)
	t.collectEvents(ch)
	t.collectServices(ch)
	t.ends.collect(ch)
}

// collectEgress exports nothing where egress is off.
func (t *Table) collectEgress(ch chan<- prometheus.Metric) {
	use, err := t.EgressUse()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(egressDesc, err)
	}
	if use == nil {
		return
	}
	most := 0
	if len(use.Busiest) > 0 {
		most = use.Busiest[0].Connections
	}
	for desc, n := range map[*prometheus.Desc]float64{
		egressDesc: float64(use.Connections), egressPortsDesc: float64(use.Ports), egressBusiestDesc: float64(most),
	} {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, n)
	}
}

// serviceLabels are the labels of metrics of a Service port. Both families have one series.
var serviceLabels = []string{"namespace", "service", "port", "protocol"}

func serviceDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("spillway_service_"+name, help, slices.Concat(serviceLabels, labels), nil)
}

func (t *Table) collectEvents(ch chan<- prometheus.Metric) {
	if t.cfg.FlowEvents == objects.EventsOff {
		return
	}
	counts := t.FlowEventCounts()
	for _, kind := range dataplane.FlowEventKinds {
		ch <- prometheus.MustNewConstMetric(eventsDesc, prometheus.CounterValue, float64(counts.Received[kind]), kind.String())
	}
	ch <- prometheus.MustNewConstMetric(eventsLostDesc, prometheus.CounterValue, float64(counts.Lost))
	ch <- prometheus.MustNewConstMetric(eventsLeftOutDesc, prometheus.CounterValue, float64(counts.LeftOut))
}

// collectServices exports the counters of Services. Ports that differ only in their family
// are added up.
func (t *Table) collectServices(ch chan<- prometheus.Metric) {
	all, err := t.ServiceCounters()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(serviceConnectionsDesc, err)
		return
	}
	if all == nil {
		return
	}
	all = withoutFamilies(all)
	top := topServices(all, t.cfg.ServiceMetricsTop)
	for _, id := range top {
		collectService(ch, id, all[id])
	}
	ch <- prometheus.MustNewConstMetric(servicesOmittedDesc, prometheus.GaugeValue, float64(len(all)-len(top)))
	uncounted := objects.SumPerCPU(t.m(objects.TCMapEventCounts),
		int(objects.TCEventCountEVENT_COUNTS))[objects.TCEventCountSERVICES_UNCOUNTED]
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
	if !c.ConnectionsOnly {
		counter(serviceBytesDesc, c.BytesToEndpoint, "to_endpoint")
		counter(serviceBytesDesc, c.BytesToClient, "to_client")
		counter(servicePacketsDesc, c.PacketsToEndpoint, "to_endpoint")
		counter(servicePacketsDesc, c.PacketsToClient, "to_client")
	}
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
