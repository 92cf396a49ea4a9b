package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
	"spillway.dev/spillway/internal/node/conntrack/stale"
	"spillway.dev/spillway/internal/node/instance"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/proxymode"
	"spillway.dev/spillway/internal/reconcile"
)

// openConntrack opens the conntrack of the agent's network namespace: metrics for
// register, and stale entries for reconcile. A kernel without conntrack is no error: it
// has no stale entries, and a dataplane that needs conntrack reports that itself.
func openConntrack(c Config, log *slog.Logger,
	register func(prometheus.Collector) error) (entries reconcile.StaleEntries, closeAll func(), err error) {
	table, err := conntrack.Open()
	if errors.Is(err, conntrack.ErrUnsupported) {
		log.Info("conntrack entries are left alone", "reason", err)
		return nil, func() {}, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open conntrack: %w", err)
	}
	r, err := stale.New(stale.Config{Table: table, Size: conntrack.ReadSize, TranslatedOnly: !proxymode.UsesNetfilter(c.ProxyMode)})
	if err == nil {
		err = errors.Join(register(r), register(conntrack.NewCollector()),
			register(conntrack.NewNamespaceCollector(namespaces(c))))
	}
	if err != nil {
		table.Close()
		return nil, nil, fmt.Errorf("register metrics of conntrack: %w", err)
	}
	return r, table.Close, nil
}

// namespaces lists the network namespaces of the agent's node. In the machine's own
// namespace these are all of the machine. Else the machine has other nodes too, and they
// are the agent's own and those of processes below --cgroup-root. An agent that cannot
// enter other namespaces lists its own only.
func namespaces(c Config) func() ([]conntrack.Namespace, error) {
	if enters, err := kernel.HaveCapability(unix.CAP_SYS_ADMIN); err == nil && (!enters || c.DropCapabilities) {
		return func() ([]conntrack.Namespace, error) { return []conntrack.Namespace{conntrack.OwnNamespace()}, nil }
	}
	if own, first := kernel.NetnsName("/proc/self"), kernel.NetnsName("/proc/1"); own == first || own == "" || first == "" {
		return conntrack.Namespaces
	}
	return func() ([]conntrack.Namespace, error) {
		if c.EBPF.CgroupRoot != "" {
			return conntrack.NamespacesOf(c.EBPF.CgroupRoot)
		}
		list, err := conntrack.Namespaces()
		return slices.DeleteFunc(list, func(n conntrack.Namespace) bool { return !n.Own }), err
	}
}

// autopilotState is the file of the values that an instance's autopilot found.
func autopilotState(lockDir string, c Config) string {
	return instance.File(lockDir, c.EBPF.BPFFS, ".conntrack")
}

// newAutopilot prepares the control of conntrack's sizes and timeouts. It returns nil if the
// autopilot is off, after it restored the changes of an earlier agent, and if the kernel has
// no conntrack.
func newAutopilot(c Config, state string, log *slog.Logger, register func(prometheus.Collector) error,
	event func(string)) (run func(context.Context) error, err error) {
	if c.Conntrack.Autopilot == autopilot.Off {
		if err := autopilot.Restore(state, namespaces(c), log); err != nil {
			log.Warn("conntrack autopilot: cannot restore all settings", "err", err)
		}
		return nil, nil
	}
	if _, err := conntrack.ReadLimits(); errors.Is(err, conntrack.ErrUnsupported) {
		return nil, nil
	}
	entries, timeouts := c.Conntrack.bounds()
	p, err := autopilot.New(autopilot.Config{
		Mode: c.Conntrack.Autopilot, Memory: c.Conntrack.memory, Entries: entries, Timeouts: timeouts,
		Namespaces: namespaces(c), State: state, Event: event, Log: log,
	})
	if err != nil {
		return nil, err
	}
	if err := register(p); err != nil {
		return nil, fmt.Errorf("register metrics of the conntrack autopilot: %w", err)
	}
	return p.Run, nil
}
