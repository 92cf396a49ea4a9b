package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/node/dnat"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/kubeproxy"
	"spillway.dev/spillway/internal/reconcile"
)

// proxyMode is one value of --proxy-mode.
type proxyMode struct {
	name    string
	open    func(context.Context, agentConfig, *slog.Logger) (dataplane.Backend, error)
	cleanup func(context.Context, agentConfig, *slog.Logger) error
	// netfilter says that Service packets are translated by netfilter, and not
	// before it sees them.
	netfilter bool
	// drain has it leave new connections to others; nil: it does that already.
	drain func(agentConfig) error
	// drained waits until the connections have ended that end with it; nil: there
	// are none.
	drained func(context.Context, agentConfig, *slog.Logger) error
}

var proxyModes = []proxyMode{
	{"ebpf", openEBPF, func(_ context.Context, c agentConfig, log *slog.Logger) error {
		return ebpf.Cleanup(ebpf.Config{BPFFS: c.BPFFS, Linger: reconcile.Linger, Log: log})
	}, false, func(c agentConfig) error {
		_, err := ebpf.Drain(ebpf.Config{BPFFS: c.BPFFS, Linger: reconcile.Linger})
		return err
	}, func(ctx context.Context, c agentConfig, log *slog.Logger) error {
		return ebpf.Drained(ctx, ebpf.Config{BPFFS: c.BPFFS, Timeouts: c.Conntrack.timeouts(), Log: log})
	}},
	{"nftables", func(ctx context.Context, c agentConfig, log *slog.Logger) (dataplane.Backend, error) {
		return nftables.New(ctx, nftables.Config{Beside: c.ProxyMode != "nftables", ServiceCounters: c.ServiceCounters, BeforeRemoval: c.takeover.keepTranslating, Log: log})
	}, func(ctx context.Context, c agentConfig, log *slog.Logger) error {
		return nftables.Cleanup(ctx, nftables.Config{BeforeRemoval: c.takeover.keepTranslating, Log: log})
	}, true, nil, nil},
	{"iptables", func(ctx context.Context, c agentConfig, log *slog.Logger) (dataplane.Backend, error) {
		return iptables.New(ctx, iptables.Config{Log: log, VerifyPartialSync: c.VerifyPartialSync})
	}, func(ctx context.Context, c agentConfig, log *slog.Logger) error {
		return iptables.Cleanup(ctx, iptables.Config{BeforeRemoval: c.takeover.keepTranslating, Log: log})
	}, true, nil, nil},
}

func modeUsesNetfilter(name string) bool {
	return slices.ContainsFunc(proxyModes, func(m proxyMode) bool { return m.name == name && m.netfilter })
}

func proxyModeNames() (names []string) {
	for _, m := range proxyModes {
		names = append(names, m.name)
	}
	return names
}

// fallbacks names, for a mode, who serves the Service ports that it cannot.
var fallbacks = map[string][]string{"ebpf": {"nftables"}}

// newBackends opens the dataplanes of this node, the chosen one first, then
// those that may help out. What they count is registered with register.
func newBackends(ctx context.Context, c agentConfig, log *slog.Logger, register func(prometheus.Collector) error) ([]dataplane.Backend, error) {
	first, err := newBackend(ctx, c.ProxyMode, c, log, register)
	if err != nil {
		return nil, err
	}
	backends := []dataplane.Backend{first}
	for _, name := range fallbacks[c.ProxyMode] {
		b, err := newBackend(ctx, name, c, log, register)
		if err != nil {
			log.Info("Service ports that the chosen dataplane cannot carry will not be served", "dataplane", c.ProxyMode, "err", err)
			continue
		}
		backends = append(backends, b)
	}
	return backends, nil
}

func newBackend(ctx context.Context, name string, c agentConfig, log *slog.Logger, register func(prometheus.Collector) error) (dataplane.Backend, error) {
	i := slices.IndexFunc(proxyModes, func(m proxyMode) bool { return m.name == name })
	b, err := proxyModes[i].open(ctx, c, log)
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

// retirement is how dataplanes go that are not in use.
type retirement struct {
	log    *slog.Logger
	failed func(dataplane string) // counts what could not be cleaned up
	later  func(func())           // has something run beside the agent's other work
	pause  time.Duration          // before the second attempt
}

// maxCleanupPause bounds the time between two attempts at a clean-up.
const maxCleanupPause = 5 * time.Minute

// cleanUnused takes away what dataplanes that this agent does not use left in
// the kernel when another --proxy-mode was in force. It runs when the new one
// serves, so that new connections always find one of them, and waits until the
// last answers are through, or, where a dataplane's own connections would end with
// it, the last of these.
func cleanUnused(ctx context.Context, c agentConfig, used []dataplane.Backend, r retirement) {
	unused := slices.DeleteFunc(slices.Clone(proxyModes), func(m proxyMode) bool {
		return slices.ContainsFunc(used, func(b dataplane.Backend) bool { return b.Name() == m.name })
	})
	for _, m := range unused {
		if m.drain == nil {
			continue
		}
		if err := m.drain(c); err != nil {
			r.log.Warn("Drain a dataplane that is not in use", "dataplane", m.name, "err", err)
		}
	}
	select {
	case <-ctx.Done():
		return // the next start does it
	case <-time.After(reconcile.Linger):
	}
	var wg sync.WaitGroup
	for _, m := range unused {
		wg.Go(func() { m.retire(ctx, c, r) })
	}
	wg.Wait()
}

// retire cleans up a dataplane that is not in use when its connections have ended.
// What fails is tried again, while the agent goes on.
func (m *proxyMode) retire(ctx context.Context, c agentConfig, r retirement) {
	if m.drained != nil {
		if err := m.drained(ctx, c, r.log); ctx.Err() != nil {
			return // the next start does it
		} else if err != nil {
			r.log.Warn("Wait for connections of a dataplane that is not in use", "dataplane", m.name, "err", err)
		}
	}
	if m.cleanedUp(ctx, c, r, r.pause) {
		return
	}
	r.later(func() {
		for pause := r.pause; ; pause = min(2*pause, maxCleanupPause) {
			select {
			case <-ctx.Done():
				return // the next start does it
			case <-time.After(pause):
			}
			if m.cleanedUp(ctx, c, r, min(2*pause, maxCleanupPause)) {
				return
			}
		}
	})
}

// cleanedUp reports whether no further attempt is needed, and else says when it comes.
func (m *proxyMode) cleanedUp(ctx context.Context, c agentConfig, r retirement, next time.Duration) bool {
	err := m.cleanup(ctx, c, r.log)
	if err == nil || ctx.Err() != nil {
		return true
	}
	r.failed(m.name)
	r.log.Warn("Clean up a dataplane that is not in use", "dataplane", m.name, "again", next, "err", err)
	return false
}

// cleanBackends takes everything of this instance out of the kernel.
func cleanBackends(ctx context.Context, c agentConfig, log *slog.Logger) error {
	var errs []error
	for _, m := range proxyModes {
		if err := m.cleanup(ctx, c, log); err != nil {
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
	log.Info("nothing of this instance is left in the kernel", "bpffs", c.BPFFS)
	return nil
}

func openEBPF(ctx context.Context, c agentConfig, log *slog.Logger) (dataplane.Backend, error) {
	cfg, err := ebpfConfig(c, log)
	if err != nil {
		return nil, err
	}
	return ebpf.New(ctx, cfg)
}

// firstNetns is the network namespace that the kernel starts with, since Linux
// 6.18 (NET_NS_INIT_INO, include/uapi/linux/nsfs.h). Before, it may have any number.
const firstNetns = "net:[4026531833]"

// mayDefaultCgroup refuses the root of cgroup2 as a default to an agent whose
// network namespace is not that of the machine, or of its container, as pid 1
// has it: the socket hooks would reach processes everywhere. So it does when that
// cannot be told: "" is a namespace that cannot be seen.
func mayDefaultCgroup(own, pid1 string) error {
	const give = "the whole machine's sockets would be served: give --cgroup-root, the cgroup of the processes that are to use Services"
	switch {
	case own != "" && (own == pid1 || own == firstNetns):
		return nil
	case own == "" || pid1 == "":
		return errors.New("find cgroup2: it cannot be told whether this is the machine's network namespace (/proc/1/ns/net cannot be read), and " + give)
	}
	return errors.New("find cgroup2: this network namespace is not that of the machine, and " + give)
}

// netnsOf names the network namespace of a process, "" if it cannot be seen.
func netnsOf(proc string) string {
	name, _ := os.Readlink(proc + "/ns/net")
	return name
}

func ebpfConfig(c agentConfig, log *slog.Logger) (ebpf.Config, error) {
	root := c.CgroupRoot
	if root == "" {
		if err := mayDefaultCgroup(netnsOf("/proc/self"), netnsOf("/proc/1")); err != nil {
			return ebpf.Config{}, err
		}
		var err error
		if root, err = kernel.Cgroup2Mount(); err != nil {
			return ebpf.Config{}, fmt.Errorf("find cgroup2: %w", err)
		}
	}
	return ebpf.Config{
		BPFFS: c.BPFFS, CgroupRoot: root, Bypass: c.Bypass, Log: log,
		FlowTableSize: uint32(c.Conntrack.flows()), Timeouts: c.Conntrack.timeouts(),
		TCPLiberal: c.Conntrack.TCPBeLiberal, Refused: c.refused,
		WatchNAT: func(changed func(bool, string)) (func(), error) {
			w, err := dnat.Watch(dnat.Config{Translated: c.takeover.translated}, changed)
			if err != nil {
				return nil, err
			}
			return func() { _ = w.Close() }, nil
		},
	}, nil
}
