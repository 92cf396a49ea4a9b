// Package proxymode knows the values of --proxy-mode: it opens the dataplanes that
// serve a node, and cleans up those that another mode left in the kernel.
package proxymode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kubeproxy"
	"spillway.dev/spillway/internal/node/takeover"
	"spillway.dev/spillway/internal/reconcile"
)

// Config is what the dataplanes of an instance need to know. The dataplanes declare their
// options; a logger, and functions that connect a dataplane to the rest of the node, are set here.
type Config struct {
	Mode     string // one of Names
	EBPF     ebpf.Config
	NFTables nftables.Config
	IPTables iptables.Config
	// MaxSourceRanges is the maximum number of source ranges on the node; 0: the dataplane's default.
	MaxSourceRanges uint32
	// Takeover keeps connections that netfilter translates; nil for --cleanup.
	Takeover *takeover.Takeover
	Log      *slog.Logger
}

// ebpf is the configuration of the eBPF dataplane, without what opening looks for in the kernel.
func (c *Config) ebpf() ebpf.Config {
	e := c.EBPF
	e.MaxSourceRanges, e.Linger, e.Log = c.MaxSourceRanges, reconcile.Linger, c.Log
	return e
}

// nftables is the configuration of the nftables dataplane.
func (c *Config) nftables() nftables.Config {
	n := c.NFTables
	n.Beside, n.BeforeRemoval, n.Log = c.Mode != "nftables", c.Takeover.KeepTranslating, c.Log
	return n
}

// iptables is the configuration of the iptables dataplane.
func (c *Config) iptables() iptables.Config {
	i := c.IPTables
	i.BeforeRemoval, i.Log = c.Takeover.KeepTranslating, c.Log
	return i
}

// Register registers what a dataplane counts.
type Register func(prometheus.Collector) error

// proxyMode is one value of --proxy-mode.
type proxyMode struct {
	name    string
	open    func(context.Context, Config) (dataplane.Backend, error)
	cleanup func(context.Context, Config) error
	// netfilter: netfilter translates Service packets; otherwise they are translated
	// before netfilter sees them.
	netfilter bool
	// drain stops the dataplane from accepting new connections; nil: it does not
	// accept any when its agent has ended.
	drain func(Config) error
	// drained waits until the connections have ended that end with the dataplane;
	// nil: there are none.
	drained func(context.Context, Config) error
	// capacity is what the dataplane carries of Services.
	capacity func(Config) intent.Capacity
}

var proxyModes = []proxyMode{
	{
		name: "ebpf", open: openEBPF,
		capacity: func(c Config) intent.Capacity { e := c.ebpf(); return e.Capacity() },
		cleanup:  func(_ context.Context, c Config) error { return upgrade.Cleanup(c.ebpf()) },
		drain: func(c Config) error {
			_, err := upgrade.Drain(c.ebpf())
			return err
		},
		drained: func(ctx context.Context, c Config) error { return upgrade.Drained(ctx, c.ebpf()) },
	},
	{
		name: "nftables", netfilter: true, capacity: func(Config) intent.Capacity { return nftables.Capacity },
		open:    func(ctx context.Context, c Config) (dataplane.Backend, error) { return nftables.New(ctx, c.nftables()) },
		cleanup: func(ctx context.Context, c Config) error { return nftables.Cleanup(ctx, c.nftables()) },
	},
	{
		name: "iptables", netfilter: true, capacity: func(Config) intent.Capacity { return iptables.Capacity },
		open:    func(ctx context.Context, c Config) (dataplane.Backend, error) { return iptables.New(ctx, c.iptables()) },
		cleanup: func(ctx context.Context, c Config) error { return iptables.Cleanup(ctx, c.iptables()) },
	},
}

// UsesNetfilter reports whether netfilter translates Service packets with a mode.
func UsesNetfilter(mode string) bool {
	return slices.ContainsFunc(proxyModes, func(m proxyMode) bool { return m.name == mode && m.netfilter })
}

// Capacity is what the dataplanes of a mode carry of Services.
func Capacity(c Config) (capacity intent.Capacity) {
	for _, m := range proxyModes {
		if m.name == c.Mode {
			capacity = m.capacity(c)
		}
	}
	if c.MaxSourceRanges > 0 {
		capacity.SourceRanges = int(c.MaxSourceRanges)
	}
	if fallbacks[c.Mode] != nil {
		capacity.FallbackRanges, capacity.FrontendSlots = nftables.Capacity.SourceRanges, nftables.Capacity.FrontendSlots
	}
	return capacity
}

// Names are the values of --proxy-mode, the default first.
func Names() (names []string) {
	for _, m := range proxyModes {
		names = append(names, m.name)
	}
	return names
}

// fallbacks are, for a mode, the dataplanes that serve the Service ports which the
// mode cannot carry.
var fallbacks = map[string][]string{"ebpf": {"nftables"}}

// Open opens the dataplanes of this node: that of c.Mode first, then its fallbacks.
// The caller must close them.
func Open(ctx context.Context, c Config, register Register) ([]dataplane.Backend, error) {
	first, err := OpenOne(ctx, c.Mode, c, register)
	if err != nil {
		return nil, err
	}
	backends := []dataplane.Backend{first}
	for _, name := range fallbacks[c.Mode] {
		b, err := OpenOne(ctx, name, c, register)
		if err != nil {
			c.Log.Info("Service ports that the chosen dataplane cannot carry will not be served", "dataplane", c.Mode, "err", err)
			continue
		}
		backends = append(backends, b)
	}
	return backends, nil
}

// OpenOne opens one dataplane without its fallbacks. name is one of Names.
func OpenOne(ctx context.Context, name string, c Config, register Register) (dataplane.Backend, error) {
	i := slices.IndexFunc(proxyModes, func(m proxyMode) bool { return m.name == name })
	b, err := proxyModes[i].open(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("load dataplane %s: %w", name, err)
	}
	if counts, ok := b.(prometheus.Collector); ok {
		if err := register(counts); err != nil {
			b.Close()
			return nil, fmt.Errorf("register metrics of dataplane %s: %w", name, err)
		}
	}
	return b, nil
}

// Cleanup removes everything of this instance from the kernel.
func Cleanup(ctx context.Context, c Config) error {
	var errs []error
	for _, m := range proxyModes {
		if err := m.cleanup(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("clean up dataplane %s: %w", m.name, err))
		}
	}
	if err := nftables.CleanupPolicies(ctx, ""); err != nil {
		errs = append(errs, fmt.Errorf("clean up do-not-track policies: %w", err))
	}
	errs = append(errs, kubeproxy.ReleaseNAT())
	if err := errors.Join(errs...); err != nil {
		return err
	}
	c.Log.Info("nothing of this instance is left in the kernel", "bpffs", c.EBPF.BPFFS)
	return nil
}
