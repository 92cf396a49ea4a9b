package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/kernel"
)

// proxyMode is one value of --proxy-mode.
type proxyMode struct {
	name    string
	open    func(context.Context, agentConfig, *slog.Logger) (dataplane.Backend, error)
	cleanup func(context.Context, agentConfig, *slog.Logger) error
}

var proxyModes = []proxyMode{
	{"ebpf", openEBPF, func(_ context.Context, c agentConfig, log *slog.Logger) error {
		return ebpf.Cleanup(ebpf.Config{BPFFS: c.BPFFS, Log: log})
	}},
	{"nftables", func(ctx context.Context, c agentConfig, log *slog.Logger) (dataplane.Backend, error) {
		return nftables.New(ctx, nftables.Config{Log: log})
	}, func(ctx context.Context, c agentConfig, log *slog.Logger) error {
		return nftables.Cleanup(ctx, nftables.Config{Log: log})
	}},
	{"iptables", func(ctx context.Context, c agentConfig, log *slog.Logger) (dataplane.Backend, error) {
		return iptables.New(ctx, iptables.Config{Log: log})
	}, func(ctx context.Context, c agentConfig, log *slog.Logger) error {
		return iptables.Cleanup(ctx, iptables.Config{Log: log})
	}},
}

func proxyModeNames() (names []string) {
	for _, m := range proxyModes {
		names = append(names, m.name)
	}
	return names
}

// newBackends opens the dataplanes of this node, the chosen one first. What
// they count is registered with register.
func newBackends(ctx context.Context, c agentConfig, log *slog.Logger, register func(prometheus.Collector) error) ([]dataplane.Backend, error) {
	for _, m := range proxyModes {
		if m.name != c.ProxyMode {
			continue
		}
		b, err := m.open(ctx, c, log)
		if err != nil {
			return nil, fmt.Errorf("load dataplane %s: %w", m.name, err)
		}
		if counts, ok := b.(prometheus.Collector); ok {
			if err := register(counts); err != nil {
				b.Close()
				return nil, fmt.Errorf("register metrics of dataplane %s: %w", m.name, err)
			}
		}
		return []dataplane.Backend{b}, nil
	}
	return nil, fmt.Errorf("load dataplane %s: no such dataplane", c.ProxyMode)
}

// cleanBackends takes everything of this instance out of the kernel.
func cleanBackends(ctx context.Context, c agentConfig, log *slog.Logger) error {
	var errs []error
	for _, m := range proxyModes {
		if err := m.cleanup(ctx, c, log); err != nil {
			errs = append(errs, fmt.Errorf("clean up dataplane %s: %w", m.name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	log.Info("nothing is left in the kernel", "bpffs", c.BPFFS)
	return nil
}

func openEBPF(ctx context.Context, c agentConfig, log *slog.Logger) (dataplane.Backend, error) {
	cfg, err := ebpfConfig(c, log)
	if err != nil {
		return nil, err
	}
	return ebpf.New(ctx, cfg)
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
