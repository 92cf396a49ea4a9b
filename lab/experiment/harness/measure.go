package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// Sample is one measurement: a load, and what it cost and left behind.
type Sample struct {
	load.Result
	// CPUPerRequest is the time that the whole machine, so client, nodes and
	// pods together, was busy for each answered request, in µs. In a network of
	// namespaces the kernel handles a packet in the context of its sender, so
	// no smaller account holds all of a node's share.
	CPUPerRequest float64 `json:"cpu_per_request_us"`
	// Conntrack is the number of entries that the load left in the conntrack
	// tables of all nodes.
	Conntrack int `json:"conntrack_entries"`
	// Expectations is the number of expectations on all nodes at the end. Dropped
	// counts the packets that conntrack dropped and the entries that it evicted.
	// Only MeasureFiles sets them.
	Expectations int   `json:"expectations,omitempty"`
	Dropped      int64 `json:"conntrack_dropped,omitempty"`
	// ServerCPUSeconds is the server's own user and system time, warm-up included;
	// only of MeasureFiles.
	ServerCPUSeconds float64 `json:"server_cpu_seconds,omitempty"`
}

// Load runs a load generator as a process of its own on a host. When ctx ends
// the process is asked to stop, and the error is that of ctx.
func (h *Harness) Load(ctx context.Context, host *topology.Host, cfg load.Config) (*load.Result, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cmd := host.Command(ctx, append([]string{h.Program, "load"}, loadArgs(cfg)...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 3 * time.Second
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var result load.Result
	if parsed := json.Unmarshal(out, &result); parsed != nil {
		if err == nil {
			err = parsed
		}
		return nil, fmt.Errorf("read result of load on %s: %w", host.Name, err)
	}
	// A load that got no answer has failed, for people; here that is a result.
	if err != nil && result.Requests > 0 {
		return nil, err
	}
	return &result, nil
}

// loadArgs is the command line that makes `spillway-lab load` run a config.
func loadArgs(cfg load.Config) []string {
	args := []string{string(cfg.Kind), cfg.Target.String(), "--output", "json",
		"--connections", strconv.Itoa(cfg.Connections),
		"--duration", cfg.Duration.String(),
		"--warmup", cfg.Warmup.String(),
	}
	if cfg.Rate > 0 {
		args = append(args, "--rate", strconv.FormatFloat(cfg.Rate, 'f', -1, 64))
	}
	if cfg.MaxRequests > 0 {
		args = append(args, "--max-requests", strconv.FormatInt(cfg.MaxRequests, 10))
	}
	if cfg.Timeout > 0 {
		args = append(args, "--timeout", cfg.Timeout.String())
	}
	if cfg.Threads > 0 {
		args = append(args, "--threads", strconv.Itoa(cfg.Threads))
	}
	if cfg.Path != "" {
		args = append(args, "--path", cfg.Path)
	}
	if cfg.Body != "" {
		args = append(args, "--body", cfg.Body)
	}
	if cfg.AnyStatus {
		args = append(args, "--any-status")
	}
	if cfg.Delay > 0 {
		args = append(args, "--delay", cfg.Delay.String())
	}
	for _, s := range cfg.Sources {
		args = append(args, "--source", s.String())
	}
	if cfg.FreshPorts {
		args = append(args, "--fresh-ports")
	}
	return args
}

// Measure runs a load and takes the machine's CPU time and the nodes'
// conntrack tables before and after.
func (h *Harness) Measure(ctx context.Context, host *topology.Host, cfg load.Config) (Sample, error) {
	if err := h.flushConntrack(); err != nil {
		return Sample{}, err
	}
	return h.MeasureAsIs(ctx, host, cfg)
}

// MeasureAsIs is Measure with the tables as they are.
func (h *Harness) MeasureAsIs(ctx context.Context, host *topology.Host, cfg load.Config) (Sample, error) {
	entries, err := h.conntrack()
	if err != nil {
		return Sample{}, err
	}
	busy, err := experiment.BusyCPU()
	if err != nil {
		return Sample{}, err
	}
	result, err := h.Load(ctx, host, cfg)
	if err != nil {
		return Sample{}, err
	}
	after, err := experiment.BusyCPU()
	if err != nil {
		return Sample{}, err
	}
	left, err := h.conntrack()
	if err != nil {
		return Sample{}, err
	}
	s := Sample{Result: *result, Conntrack: max(left-entries, 0)}
	if result.Requests > 0 {
		// The warm-up's requests cost, too.
		share := result.Seconds / (result.Seconds + cfg.Warmup.Seconds())
		s.CPUPerRequest = (after - busy) * 1e6 / float64(result.Requests) * share
	}
	return s, nil
}

// conntrack counts the entries on all nodes.
func (h *Harness) conntrack() (int, error) {
	total := 0
	for i := range h.Cluster.Spec.Nodes {
		n, err := h.Cluster.Node(i).ConntrackCount()
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// flushConntrack empties the nodes' tables: expiring entries of the last load must not
// hide the entries of the next, nor fill the table.
func (h *Harness) flushConntrack() error {
	for i := range h.Cluster.Spec.Nodes {
		node := h.Cluster.Node(i)
		count, err := node.ConntrackCount()
		if err != nil {
			return err
		}
		if count == 0 {
			continue
		}
		err = node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
		if err != nil {
			return fmt.Errorf("flush conntrack table of %s: %w", node.Name, err)
		}
	}
	return nil
}

// RoutePods gives an outside host routes to the pods of every node. Real
// clients have none; it is what lets a pod be measured without a Service.
func (h *Harness) RoutePods(host *topology.Host) error {
	return host.Do(func() error {
		for i := range h.Cluster.Spec.Nodes {
			node := h.Cluster.Node(i)
			for _, cidr := range node.PodCIDRs {
				route := &netlink.Route{
					Dst: &net.IPNet{
						IP:   cidr.Addr().AsSlice(),
						Mask: net.CIDRMask(cidr.Bits(), cidr.Addr().BitLen()),
					},
					Gw: node.Addr(cidr.Addr()).AsSlice(),
				}
				if err := netlink.RouteReplace(route); err != nil {
					return fmt.Errorf("route %s by %s on %s: %w", cidr, node.Name, host.Name, err)
				}
			}
		}
		return nil
	})
}

// RoutePodBy gives an outside host a route to one pod by way of a node that the pod is not
// on. Hosts ignore redirects to a shorter one.
func (h *Harness) RoutePodBy(host, pod, node *topology.Host) error {
	return host.Do(func() error {
		route := &netlink.Route{Dst: netlink.NewIPNet(pod.IPv4.AsSlice()), Gw: node.IPv4.AsSlice()}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("route %s by %s on %s: %w", pod.IPv4, node.Name, host.Name, err)
		}
		return nil
	})
}

// EndRow takes the cluster of one row down. If measuring ended with an error, which
// *err is, the row keeps the last lines of what ran there; an error of Down is added
// to *err.
func (h *Harness) EndRow(m *experiment.Measurement, err *error) {
	if *err != nil {
		m.Log = h.Logs()
	}
	*err = errors.Join(*err, h.Down())
}
