package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/internal/telemetry"
)

func newAgentCommand() *cobra.Command {
	var c agentConfig
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Serve the Services of this node",
		Long: `Serve the Services of this node, in the network namespace that the agent is
started in. SIGTERM or SIGINT ends the agent; the kernel goes on serving what
was written, and the next agent takes it over. --cleanup takes it away.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.readConfig(cmd.Flags()); err != nil {
				return err
			}
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			saveMemory()
			return newAgent(c, cmd.ErrOrStderr()).run(ctx)
		},
	}
	c.addFlags(cmd.Flags())
	return cmd
}

// saveMemory has the heap grow by half, not to the double, before it is collected,
// unless GOGC says otherwise. What an agent holds hardly changes, and collecting it
// is cheap; the memory is the node's.
func saveMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// agent holds what run needs from outside, so that tests can put in their own.
type agent struct {
	cfg      agentConfig
	stderr   io.Writer
	euid     func() int
	lockDir  string
	backends func(context.Context, agentConfig, *slog.Logger, func(prometheus.Collector) error) ([]dataplane.Backend, error)
	policies func(context.Context, agentConfig, *slog.Logger) dataplane.Policies
	cleanup  func(context.Context, agentConfig, *slog.Logger) error
	unused   func(context.Context, agentConfig, []dataplane.Backend, retirement)
	takeOver func(context.Context, *takeover)
	entries  func(agentConfig, *slog.Logger, func(prometheus.Collector) error) (reconcile.StaleEntries, func(), error)
	pilot    func(c agentConfig, state string, log *slog.Logger, register func(prometheus.Collector) error, event func(string)) (func(context.Context) error, error)
	// serving is told where health and metrics are served; nil: nobody asks.
	serving func(healthz, metrics string)
}

func newAgent(c agentConfig, stderr io.Writer) *agent {
	return &agent{
		cfg:      c,
		stderr:   stderr,
		euid:     os.Geteuid,
		lockDir:  "/run/spillway",
		backends: newBackends,
		policies: newPolicies,
		cleanup:  cleanBackends,
		unused:   cleanUnused,
		takeOver: func(ctx context.Context, t *takeover) { t.run(ctx) },
		entries:  openConntrack,
		pilot:    newAutopilot,
	}
}

// run serves until ctx ends, and leaves the kernel serving.
func (a *agent) run(ctx context.Context) error {
	if err := a.cfg.Validate(); err != nil {
		return err
	}
	if a.euid() != 0 {
		return errors.New("run agent: not root: start it as root, or in a privileged pod")
	}
	log := newLogger(a.stderr, a.cfg)
	lock, err := lockInstance(a.lockDir, a.cfg.BPFFS)
	if err != nil {
		return err
	}
	defer lock.release()
	if a.cfg.Cleanup {
		return errors.Join(a.cleanup(ctx, a.cfg, log), autopilot.Restore(autopilotState(a.lockDir, a.cfg), namespaces(a.cfg), log))
	}
	a.cfg.warnOfIdleFlags(log)
	a.cfg.warnOfExposure(log)
	a.cfg.warnOfRemarks(log)
	return a.serve(ctx, log)
}

// serve builds the way of a change, right to left, and runs it.
func (a *agent) serve(ctx context.Context, log *slog.Logger) error {
	in, err := openSource(a.cfg, log)
	if err != nil {
		return err
	}
	build := buildInfo()
	log.Info("spillway agent", "version", build.Version, "node", a.cfg.NodeName,
		"proxyMode", a.cfg.ProxyMode, "source", in.name, "bpffs", a.cfg.BPFFS)
	a.cfg.takeover = newTakeover(a.cfg, log)
	a.cfg.refused = in.refused
	metrics := telemetry.NewMetrics(build)
	status := &lateStatus{}
	health := telemetry.Health{Timeout: 2 * a.cfg.SyncPeriod, Pending: status.pending, Leaving: status.leaving}
	servers, err := a.listen(ctx, health, metrics, log)
	if err != nil {
		return err
	}
	defer servers.close()
	backends, err := a.backends(ctx, a.cfg, log, metrics.Register)
	if err != nil {
		return err
	}
	defer closeBackends(backends, log)
	if a.cfg.DropCapabilities {
		// Only loading the programs needs them: no input that is read later from the network
		// or the API server meets a process that has them.
		if err := kernel.DropCapabilities(unix.CAP_SYS_ADMIN, unix.CAP_PERFMON); err != nil {
			return err
		}
	}
	policies := a.policies(ctx, a.cfg, log)
	defer policies.Close()
	if counts, ok := policies.(prometheus.Collector); ok {
		if err := metrics.Register(counts); err != nil {
			return fmt.Errorf("serve metrics: %w", err)
		}
	}
	entries, closeEntries, err := a.entries(a.cfg, log, metrics.Register)
	if err != nil {
		return err
	}
	defer closeEntries()
	checks := telemetry.NewHealthChecks(len(a.cfg.NodePortAddresses) == 0, health.Healthy, log)
	defer checks.Close()
	var background sync.WaitGroup
	defer background.Wait()
	loop, err := reconcile.New(reconcile.Config{
		Tracker:       intent.New(a.cfg.intent()),
		Backends:      backends,
		SyncPeriod:    a.cfg.SyncPeriod,
		MinSyncPeriod: a.cfg.MinSyncPeriod,
		OnFirstSync: func(ctx context.Context) {
			retire := retirement{log, metrics.CleanupFailed, background.Go, 5 * time.Second}
			background.Go(func() { a.unused(ctx, a.cfg, backends, retire); a.takeOver(ctx, a.cfg.takeover) })
		},
		Policies:      policies,
		PolicyTracker: policy.New(policyConfig(a.cfg)),
		Bypass:        bypass(backends),
		OnPolicies:    in.policies,

		StaleEntries: entries,
		OnProblems:   in.tell,
		HealthChecks: checks,
		Metrics:      metrics,
		Logger:       log,
	})
	if err != nil {
		return fmt.Errorf("start reconcile: %w", err)
	}
	status.set(loop)
	beside, err := a.beside(in, metrics, log)
	if err != nil {
		return err
	}
	return runAll(ctx, append(append(in.parts, beside...),
		loop.Run,
		servers.run,
		func(ctx context.Context) error { return followAddrs(ctx, loop.SetNodeAddrs) },
		func(ctx context.Context) error { return in.Run(ctx, loop.Deliver) },
	)...)
}

// beside makes what runs beside the way of a change and is no part of it.
func (a *agent) beside(in *input, m *telemetry.Metrics, log *slog.Logger) (parts []func(context.Context) error, err error) {
	for _, one := range in.metrics {
		if err := m.Register(one); err != nil {
			return nil, fmt.Errorf("serve metrics: %w", err)
		}
	}
	pilot, err := a.pilot(a.cfg, autopilotState(a.lockDir, a.cfg), log, m.Register, in.event)
	if err != nil {
		return nil, err
	}
	push, err := newInflux(a.cfg.Influx, a.cfg.NodeName, m, log)
	if err != nil {
		return nil, err
	}
	for _, part := range []func(context.Context) error{pilot, push} {
		if part != nil {
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// listen opens the two HTTP servers before anything is loaded: an address in
// use is found while there is nothing to undo.
func (a *agent) listen(ctx context.Context, health telemetry.Health, m *telemetry.Metrics, log *slog.Logger) (*servers, error) {
	s := &servers{log: log, list: []*server{
		{what: "health", flag: "--healthz-bind-address", addr: a.cfg.HealthzAddr, handler: telemetry.HealthHandler(health, m)},
		{what: "metrics", flag: "--metrics-bind-address", addr: a.cfg.MetricsAddr, handler: telemetry.MetricsHandler(m, a.cfg.ProxyMode, a.cfg.Profiling)},
	}}
	if err := s.open(ctx, a.cfg.Takeover != ""); err != nil {
		s.close()
		return nil, err
	}
	log.Info("serving", "healthz", s.list[0].open.Addr(), "metrics", s.list[1].open.Addr())
	if a.serving != nil {
		a.serving(s.list[0].open.Addr(), s.list[1].open.Addr())
	}
	return s, nil
}

// lateStatus lets health be asked before the loop exists; loading a dataplane
// takes a while, and a starting proxy is a healthy one, as long as it takes for the
// source to say all there is.
type lateStatus struct {
	mu   sync.Mutex
	loop *reconcile.Reconciler
}

func (s *lateStatus) set(loop *reconcile.Reconciler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loop = loop
}

func (s *lateStatus) pending() (since, lastSynced time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loop == nil {
		return time.Time{}, time.Time{}
	}
	st := s.loop.Status()
	if !st.Listed {
		return time.Time{}, time.Time{} // it waits for the source, which a restart does not mend
	}
	return st.PendingSince, st.LastSynced
}

func (s *lateStatus) leaving() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loop != nil && s.loop.Status().NodeLeaving
}

// followAddrs reports the node's addresses until ctx ends.
func followAddrs(ctx context.Context, set func([]netip.Addr)) error {
	if err := kernel.WatchAddrs(ctx, set); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// runAll runs parts until ctx ends or one of them fails, waits for all, and
// returns the first failure.
func runAll(ctx context.Context, parts ...func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, part := range parts {
		wg.Go(func() {
			err := part(ctx)
			if err == nil && ctx.Err() == nil {
				err = errors.New("a part of the agent ended by itself")
			}
			if err != nil && !errors.Is(err, context.Canceled) {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func closeBackends(backends []dataplane.Backend, log *slog.Logger) {
	for _, b := range backends {
		if err := b.Close(); err != nil {
			log.Warn("close dataplane", "dataplane", b.Name(), "err", err)
		}
	}
	log.Info("the agent ends; the kernel goes on serving what it has")
}

// newLogger writes to w; the levels are those of Kubernetes components, where
// -v 4 is for debugging.
func newLogger(w io.Writer, c agentConfig) *slog.Logger {
	opts := &slog.HandlerOptions{Level: slog.LevelInfo}
	if c.Verbosity >= 4 {
		opts.Level = slog.LevelDebug
	}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
