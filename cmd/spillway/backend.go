package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/kernel"
)

// newBackends loads the dataplanes of this node, the chosen one first. What
// they count is registered with register.
func newBackends(ctx context.Context, c agentConfig, log *slog.Logger, register func(prometheus.Collector) error) ([]dataplane.Backend, error) {
	cfg, err := ebpfConfig(c, log)
	if err != nil {
		return nil, err
	}
	b, err := ebpf.New(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("load dataplane ebpf: %w", err)
	}
	if err := register(b); err != nil {
		b.Close()
		return nil, fmt.Errorf("register metrics of dataplane ebpf: %w", err)
	}
	return []dataplane.Backend{b}, nil
}

// cleanBackends takes everything of this instance out of the kernel.
func cleanBackends(c agentConfig, log *slog.Logger) error {
	if err := ebpf.Cleanup(ebpf.Config{BPFFS: c.BPFFS}); err != nil {
		return fmt.Errorf("clean up dataplane ebpf: %w", err)
	}
	log.Info("nothing is left in the kernel", "bpffs", c.BPFFS)
	return nil
}

func ebpfConfig(c agentConfig, log *slog.Logger) (ebpf.Config, error) {
	root := c.CgroupRoot
	if root == "" {
		var err error
		if root, err = kernel.Cgroup2Mount(); err != nil {
			return ebpf.Config{}, fmt.Errorf("find cgroup2: %w", err)
		}
	}
	return ebpf.Config{
		BPFFS: c.BPFFS, CgroupRoot: root, Bypass: c.Bypass, Log: log,
		FlowTableSize: c.Conntrack.flows(), Timeouts: c.Conntrack.timeouts(),
	}, nil
}
