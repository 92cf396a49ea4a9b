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
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kubeproxy"
	"spillway.dev/spillway/internal/node/takeover"
	"spillway.dev/spillway/internal/reconcile"
)

// Config is what the dataplanes of an instance need to know. The fields have the
// meaning of the agent's flags of these names.
type Config struct {
	Mode              string // one of Names
	BPFFS             string
	CgroupRoot        string // "": where cgroup2 is mounted
	SocketHooks       string // --socket-hooks
	Bypass            string
	ServiceCounters   bool
	VerifyPartialSync string
	// Sizes of eBPF's maps; 0: its defaults. FitMaps sets them.
	FlowTableSize     uint32
	MaxFrontends      uint32
	MaxEndpoints      uint32
	MaxSourceRanges   uint32 // --max-source-ranges; 0: the dataplane's default
	Timeouts          ebpf.Timeouts
	TCPLiberal        bool
	LeavePrevious     bool // --leave-previous-layout
	DropsCapabilities bool // --drop-capabilities, after Open
	SCTP              bool // --ebpf-sctp
	FlowEvents        string
	FlowEventsSample  uint32
	FlowEventsRate    uint32
	EndSockets        bool // --end-sockets
	OutlierEjection   bool // --outlier-ejection
	BalanceByLoad     bool // --balance-by-load
	MaglevSeed        string
	DSRKeys           []ebpf.DSRKey // of --dsr-key-file
	DSRPort           uint16
	XDP               string // ebpf.XDPModes
	ServiceMetrics    bool   // --service-metrics is not off
	ServiceMetricsTop int    // 0: all
	// Refused receives a text for each address of a pod that is refused; may be nil.
	Refused func(note string)
	// Takeover keeps connections that netfilter translates; nil for --cleanup.
	Takeover *takeover.Takeover
	Log      *slog.Logger
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
		capacity: func(c Config) intent.Capacity { m := mapsConfig(c); return m.Capacity() },
		cleanup: func(_ context.Context, c Config) error {
			return ebpf.Cleanup(ebpf.Config{BPFFS: c.BPFFS, Linger: reconcile.Linger, Log: c.Log})
		},
		drain: func(c Config) error {
			_, err := ebpf.Drain(ebpf.Config{BPFFS: c.BPFFS, Linger: reconcile.Linger})
			return err
		},
		drained: func(ctx context.Context, c Config) error {
			return ebpf.Drained(ctx, ebpf.Config{BPFFS: c.BPFFS, Timeouts: c.Timeouts, Linger: reconcile.Linger, Log: c.Log})
		},
	},
	{
		name: "nftables", netfilter: true, capacity: func(Config) intent.Capacity { return nftables.Capacity },
		open: func(ctx context.Context, c Config) (dataplane.Backend, error) {
			return nftables.New(ctx, nftables.Config{Beside: c.Mode != "nftables", ServiceCounters: c.ServiceCounters, BeforeRemoval: c.Takeover.KeepTranslating, Log: c.Log})
		},
		cleanup: func(ctx context.Context, c Config) error {
			return nftables.Cleanup(ctx, nftables.Config{BeforeRemoval: c.Takeover.KeepTranslating, Log: c.Log})
		},
	},
	{
		name: "iptables", netfilter: true, capacity: func(Config) intent.Capacity { return iptables.Capacity },
		open: func(ctx context.Context, c Config) (dataplane.Backend, error) {
			return iptables.New(ctx, iptables.Config{Log: c.Log, VerifyPartialSync: c.VerifyPartialSync})
		},
		cleanup: func(ctx context.Context, c Config) error {
			return iptables.Cleanup(ctx, iptables.Config{BeforeRemoval: c.Takeover.KeepTranslating, Log: c.Log})
		},
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
		capacity.FallbackRanges = nftables.Capacity.SourceRanges
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
	c.Log.Info("nothing of this instance is left in the kernel", "bpffs", c.BPFFS)
	return nil
}
