package harness

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// MeasureFiles is Measure for files that a server on a host sends. With full, other
// flows fill the conntrack table of node0 while it runs.
func (h *Harness) MeasureFiles(ctx context.Context, host, server *topology.Host, cfg load.Config, full bool) (Sample, error) {
	if err := h.prepareTable(ctx, full); err != nil {
		return Sample{}, err
	}
	before, err := h.Counters(ctx, h.Cluster.Node(0))
	if err != nil {
		return Sample{}, err
	}
	busy, err := h.serverCPU(server)
	if err != nil {
		return Sample{}, err
	}
	s, err := h.MeasureAsIs(ctx, host, cfg)
	if err != nil {
		return Sample{}, err
	}
	after, err := h.serverCPU(server)
	if err != nil {
		return Sample{}, err
	}
	s.ServerCPUSeconds = after - busy
	counted, err := h.Counters(ctx, h.Cluster.Node(0))
	if err != nil {
		return Sample{}, err
	}
	counted = counted.Minus(before)
	s.Dropped = int64(counted.Drop + counted.EarlyDrop)
	s.Expectations, err = h.expectations(ctx)
	return s, err
}

// prepareTable empties the nodes' tables, or fills the table of node0.
func (h *Harness) prepareTable(ctx context.Context, full bool) error {
	node := h.Cluster.Node(0)
	if !full {
		for i := range h.Cluster.Spec.Nodes {
			if err := EmptyConntrack(ctx, h.Cluster.Node(i)); err != nil {
				return err
			}
		}
		return nil
	}
	limit, err := ConntrackLimit(node)
	if err != nil {
		return err
	}
	if n, err := node.ConntrackCount(); err != nil || n >= limit {
		return err
	}
	if err := EmptyConntrack(ctx, node); err != nil {
		return err
	}
	return FillConntrack(ctx, node, 0)
}

// expectations returns the number of expectations on all nodes.
func (h *Harness) expectations(ctx context.Context) (sum int, err error) {
	for i := range h.Cluster.Spec.Nodes {
		n, err := Expectations(ctx, h.Cluster.Node(i))
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// Expectations returns the number of expectations of all helpers in a node's conntrack.
func Expectations(ctx context.Context, node *topology.Host) (sum int, err error) {
	err = node.Do(func() error {
		conn, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer conn.Close()
		byHelper, err := conn.Expectations(ctx)
		for _, n := range byHelper {
			sum += n
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("count expectations: %w", err)
	}
	return sum, nil
}

// serverCPU returns the CPU time of the server of a host so far, in seconds.
func (h *Harness) serverCPU(host *topology.Host) (float64, error) {
	pid, ok := h.pids[host.Name]
	if !ok {
		return 0, fmt.Errorf("read CPU time of the server on %s: none was started", host.Name)
	}
	// The kernel's number of a process's CPU clock: clock_getcpuclockid(3).
	const processClock = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|processClock), &ts); err != nil {
		return 0, fmt.Errorf("read CPU time of the server on %s: %w", host.Name, err)
	}
	return float64(ts.Nano()) / 1e9, nil
}
