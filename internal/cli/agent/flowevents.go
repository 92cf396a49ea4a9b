package agent

import (
	"context"
	"log/slog"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/observe/flowlog"
	nodeapi "spillway.dev/spillway/internal/observe/server"
	"spillway.dev/spillway/internal/reconcile"
)

const topPrefix = "top-"

// countConnections is the value of --service-metrics that costs no packet of a known flow, and
// connectionsTop the number of Service ports that it exports: some 20 series each.
const (
	countConnections = "connections"
	connectionsTop   = 100
)

func (c *Config) eventsFlags() []flag {
	return []flag{
		// A flow that is served makes no event unless a client watches, so its packets cost nothing more.
		{name: "flow-events", to: at(&c.EBPF.FlowEvents, ebpf.EventsOnDemand), modes: onEBPF,
			choices: []string{ebpf.EventsOff, ebpf.EventsRefused, ebpf.EventsOnDemand, ebpf.EventsAll},
			usage: "Events that the eBPF programs store for the agent: off, refused (packets that a Service refuses, or that are dropped), " +
				"on-demand (also flows, while a client of the API watches them) or all (also flows: opened, answered, closed, with packets and " +
				"bytes)."},
		{name: "flow-events-sample", to: at(&c.EBPF.FlowEventsSample, 1), modes: onEBPF,
			usage: "Report 1 of N flows; 0 and 1 report every flow. Refusals and drops are not sampled."},
		{name: "flow-events-rate", to: at(&c.EBPF.FlowEventsRate, 1000), modes: onEBPF,
			usage: "Maximum number of flows of a Service port that are reported in a second, and of its refusals and drops. 0: no limit."},
		{name: "service-metrics", to: at(&c.ServiceMetrics, countConnections), modes: onEBPF,
			choices: []string{"off", countConnections, "top-100", "all"}, open: true,
			usage: "Service ports with metrics of their own (spillway_service_*): off, connections (the 100 most used, of namespaces in turn, " +
				"without packets and bytes), top-N (the N most used, such as top-100) or all."},
	}
}

// validateEvents checks --flow-events-rate and --service-metrics.
func (c *Config) validateEvents() error {
	if c.EBPF.FlowEventsRate > ebpf.MaxEventsRate {
		return cli.UsageErrorf("--flow-events-rate %d: must be at most %d; 0 is no limit", c.EBPF.FlowEventsRate, ebpf.MaxEventsRate)
	}
	c.EBPF.ServiceMetrics, c.EBPF.ServiceMetricsTop = c.ServiceMetrics != "off" && c.ServiceMetrics != "", 0
	if c.EBPF.ServiceConnectionsOnly = c.ServiceMetrics == countConnections; c.EBPF.ServiceConnectionsOnly {
		c.EBPF.ServiceMetricsTop = connectionsTop
		return nil
	}
	if n, isTop := strings.CutPrefix(c.ServiceMetrics, topPrefix); isTop {
		top, err := strconv.ParseUint(n, 10, 31)
		if err != nil || top == 0 {
			return cli.UsageErrorf("--service-metrics %q: no number of Service ports: write one from 1 to %d, such as top-100",
				c.ServiceMetrics, math.MaxInt32)
		}
		c.EBPF.ServiceMetricsTop = int(top)
	} else if c.EBPF.ServiceMetrics && c.ServiceMetrics != "all" {
		return cli.UsageErrorf("--service-metrics %q: not a choice: use off, connections, top-N or all", c.ServiceMetrics)
	}
	return nil
}

// followFlows returns the flow events of the node, and the part that reads them; both are nil
// if no dataplane reports events. Services are served even if the events cannot be read.
func (a *agent) followFlows(loop *reconcile.Reconciler, backends []dataplane.Backend,
	log *slog.Logger) (nodeapi.Events, func(context.Context) error) {
	for _, b := range backends {
		reporter, ok := b.(dataplane.FlowReporter)
		if !ok {
			continue
		}
		flows := flowlog.New(flowlog.Config{Node: a.cfg.NodeName, Owners: owners(loop)})
		events := nodeapi.FlowEvents{Mode: a.cfg.EBPF.FlowEvents, Log: flows, Reporter: reporter}
		if on, ok := b.(dataplane.FlowSwitch); ok && events.Mode == ebpf.EventsOnDemand {
			events.Demand = flowlog.NewDemand(on, log)
		}
		return events, func(ctx context.Context) error {
			var demand sync.WaitGroup
			defer demand.Wait()
			demand.Go(func() { events.Demand.Run(ctx) })
			if err := reporter.ReportFlows(ctx, flows.Add); err != nil && ctx.Err() == nil {
				log.Error("flow events are not shown", "err", err)
			}
			<-ctx.Done()
			return nil
		}
	}
	return nil, nil
}

// owners asks reconcile what has an address.
func owners(loop *reconcile.Reconciler) func(context.Context, []netip.Addr) ([]flowlog.Owner, error) {
	return func(ctx context.Context, addrs []netip.Addr) ([]flowlog.Owner, error) {
		names := make([]reconcile.Address, len(addrs))
		for i, addr := range addrs {
			names[i].AddrPort = netip.AddrPortFrom(addr, 0)
		}
		if err := loop.Names(ctx, names); err != nil {
			return nil, err
		}
		out := make([]flowlog.Owner, len(names))
		for i, n := range names {
			out[i].Node = n.Node
			if n.Pod != (model.Name{}) {
				out[i].Pod = n.Pod.String()
			}
		}
		return out, nil
	}
}
