// Package agent is the command that serves the Services of a node.
package agent

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

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent/kubeproxyconfig"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
	"spillway.dev/spillway/internal/node/instance"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/takeover"
	nodeapi "spillway.dev/spillway/internal/observe/server"
	"spillway.dev/spillway/internal/proxymode"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/internal/telemetry"
)

// NewCommand returns the command agent.
func NewCommand() *cobra.Command {
	var c Config
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Serve the Services of this node",
		Long: `Serves the Services of this node, in the network namespace that the agent is
started in. SIGTERM or SIGINT ends the agent. The kernel continues to serve what the
agent wrote, and the next agent takes it over. --cleanup removes it.`,
		Example: `  spillway agent --kubeconfig ./kubeconfig --cluster-cidr 10.244.0.0/16
  spillway agent --manifests ./yaml --proxy-mode nftables
  spillway agent --cleanup`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.readConfig(cmd.Flags()); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			SaveMemory()
			return newAgent(c, cmd.ErrOrStderr()).run(ctx)
		},
	}
	c.AddFlags(cmd.Flags())
	c.completeFlags(cmd)
	return cmd
}

// SaveMemory makes the garbage collector start when the heap has grown by half, not to
// its double, unless GOGC is set. An agent's data hardly changes, so collecting is cheap,
// and the node needs the memory.
func SaveMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// agent holds run's dependencies, so that tests can replace them.
type agent struct {
	cfg      Config
	stderr   io.Writer
	euid     func() int
	lockDir  string
	backends func(context.Context, proxymode.Config, proxymode.Register) ([]dataplane.Backend, error)
	policies func(context.Context, *slog.Logger) dataplane.DoNotTrack
	cleanup  func(context.Context, proxymode.Config) error
	unused   func(context.Context, proxymode.Config, []dataplane.Backend, proxymode.Retirement)
	takeOver func(context.Context, *takeover.Takeover)
	entries  func(Config, *slog.Logger, func(prometheus.Collector) error) (reconcile.StaleEntries, func(), error)
	pilot    func(c Config, state string, log *slog.Logger, register func(prometheus.Collector) error,
		event func(string)) (func(context.Context) error, error)
	// serving receives the addresses of health and metrics; may be nil.
	serving func(healthz, metrics string)
}

func newAgent(c Config, stderr io.Writer) *agent {
	return &agent{
		cfg:      c,
		stderr:   stderr,
		euid:     os.Geteuid,
		lockDir:  "/run/spillway",
		backends: proxymode.Open,
		policies: proxymode.OpenDoNotTrack,
		cleanup:  proxymode.Cleanup,
		unused:   proxymode.CleanUnused,
		takeOver: func(ctx context.Context, t *takeover.Takeover) { t.Run(ctx) },
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
		return errors.New("run agent: not root: run it as root, or in a privileged pod")
	}
	log := newLogger(a.stderr, a.cfg)
	lock, err := instance.Acquire(a.lockDir, a.cfg.EBPF.BPFFS)
	if err != nil {
		return err
	}
	defer lock.Release()
	if a.cfg.Cleanup {
		a.cfg.API.removeStale(a.lockDir, a.cfg.EBPF.BPFFS)
		return errors.Join(a.cleanup(ctx, a.cfg.Dataplanes(log)), autopilot.Restore(autopilotState(a.lockDir, a.cfg), namespaces(a.cfg), log))
	}
	a.cfg.warnOfIdleFlags(log)
	a.cfg.warnOfExposure(log)
	a.cfg.warnOfRemarks(log)
	return a.serve(ctx, log)
}

// serve builds the parts of the data flow, from the dataplanes to the source, and
// runs them.
func (a *agent) serve(ctx context.Context, log *slog.Logger) error {
	in, err := openSource(a.cfg, log)
	if err != nil {
		return err
	}
	build := cli.Build()
	log.Info("spillway agent", "version", build.Version, "node", a.cfg.NodeName,
		"proxyMode", a.cfg.ProxyMode, "source", in.name, "bpffs", a.cfg.EBPF.BPFFS)
	a.cfg.logMapSizes(log)
	metrics := telemetry.NewMetrics(build)
	metrics.SetFeature(kubeproxyconfig.GateExternalIPs, a.cfg.AllowExternalIPs)
	status := &pendingStatus{}
	health := telemetry.Health{Timeout: 2 * a.cfg.SyncPeriod, Pending: status.pending, Leaving: status.leaving}
	servers, err := a.listen(ctx, health, metrics, log)
	if err != nil {
		return err
	}
	defer servers.close()
	dataplanes := a.cfg.Dataplanes(log)
	dataplanes.EBPF.Refused = in.refused
	dataplanes.Takeover = takeover.New(takeover.Config{Wanted: a.cfg.Takeover != "",
		Netfilter: proxymode.UsesNetfilter(a.cfg.ProxyMode), Log: log})
	parts, err := a.open(ctx, dataplanes, metrics, log)
	if err != nil {
		return err
	}
	defer parts.close(log)
	checks := telemetry.NewHealthChecks(len(a.cfg.NodePortAddresses) == 0, health.Serving, log)
	defer checks.Close()
	var background sync.WaitGroup
	defer background.Wait()
	config := a.loopConfig(in, parts, metrics, log)
	config.HealthChecks = checks
	config.OnFirstSync = func(ctx context.Context) {
		retire := proxymode.Retirement{Failed: metrics.CleanupFailed, Later: background.Go, Pause: 5 * time.Second}
		background.Go(func() { a.unused(ctx, dataplanes, parts.backends, retire); a.takeOver(ctx, dataplanes.Takeover) })
		background.Go(debug.FreeOSMemory) // what the start left: the runtime returns it over minutes
	}
	loop, err := reconcile.New(config)
	if err != nil {
		return fmt.Errorf("start reconcile: %w", err)
	}
	status.set(loop)
	beside, err := a.sideTasks(in, metrics, log)
	if err != nil {
		return err
	}
	events, follow := a.followFlows(loop, parts.backends, log)
	if follow != nil {
		beside = append(beside, follow)
	}
	export, err := a.newOTLP(events, metrics, log)
	if err != nil {
		return err
	}
	if export != nil {
		beside = append(beside, export)
	}
	findings := nodeapi.NewFindings(in.findingBegan)
	if err := metrics.Register(findings); err != nil {
		return fmt.Errorf("serve metrics: %w", err)
	}
	api, err := a.newAPI(loop, parts, events, findings, log)
	if err != nil {
		return err
	}
	return runAll(ctx, append(append(in.parts, beside...),
		api,
		loop.Run,
		servers.run,
		func(ctx context.Context) error { return followAddrs(ctx, loop.SetNodeAddrs) },
		func(ctx context.Context) error { return a.cfg.followEgress(ctx, loop.SetEgress) },
		func(ctx context.Context) error { return in.Run(ctx, loop.Deliver) },
	)...)
}

// kernelParts holds the parts of the kernel that the agent writes to.
type kernelParts struct {
	backends     []dataplane.Backend
	policies     dataplane.DoNotTrack
	entries      reconcile.StaleEntries
	closeEntries func()
}

// open opens the parts of the kernel that the agent writes to. The caller must close
// them, unless there is an error.
func (a *agent) open(ctx context.Context, dataplanes proxymode.Config, m *telemetry.Metrics,
	log *slog.Logger) (parts *kernelParts, err error) {
	p := &kernelParts{closeEntries: func() {}}
	defer func() {
		if err != nil {
			p.close(log)
		}
	}()
	if p.backends, err = a.backends(ctx, dataplanes, m.Register); err != nil {
		return nil, err
	}
	if a.cfg.DropCapabilities {
		// Only loading the programs needs them. The agent drops them before it reads
		// input from the network or from the API server.
		if err := kernel.DropCapabilities(unix.CAP_SYS_ADMIN, unix.CAP_PERFMON); err != nil {
			return nil, err
		}
	}
	p.policies = a.policies(ctx, log)
	if counts, ok := p.policies.(prometheus.Collector); ok {
		if err := m.Register(counts); err != nil {
			return nil, fmt.Errorf("serve metrics: %w", err)
		}
	}
	entries, closeEntries, err := a.entries(a.cfg, log, m.Register)
	if err != nil {
		return nil, err
	}
	p.entries, p.closeEntries = entries, closeEntries
	return p, nil
}

// close closes what open has opened, in the opposite order. The kernel continues to
// serve.
func (p *kernelParts) close(log *slog.Logger) {
	p.closeEntries()
	if p.policies != nil {
		_ = p.policies.Close()
	}
	if p.backends != nil {
		closeBackends(p.backends, log)
	}
}

// loopConfig is the configuration of reconcile, except for the fields that need
// parts which serve closes.
func (a *agent) loopConfig(in *input, parts *kernelParts, m *telemetry.Metrics, log *slog.Logger) reconcile.Config {
	cfg := a.cfg.intent()
	cfg.APIServer = in.apiServer
	return reconcile.Config{
		Tracker:       decisions.New(cfg, proxymode.DoNotTrackConfig(a.cfg.NodeName, a.cfg.ProxyName, a.cfg.ProxyMode)),
		Backends:      parts.backends,
		SyncPeriod:    a.cfg.SyncPeriod,
		MinSyncPeriod: a.cfg.MinSyncPeriod,
		Policies:      parts.policies,
		Bypass:        proxymode.Bypass(parts.backends),
		OnDoNotTrack:  in.policies,
		StaleEntries:  parts.entries,
		OnProblems:    in.tell,
		Metrics:       m,
		Logger:        log,
	}
}

// sideTasks returns the parts that run beside the data flow.
func (a *agent) sideTasks(in *input, m *telemetry.Metrics, log *slog.Logger) (parts []func(context.Context) error, err error) {
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

// listen opens the two HTTP servers before the dataplane loads: with --bind-address-hard-fail,
// an address in use fails before anything needs cleanup.
func (a *agent) listen(ctx context.Context, health telemetry.Health, m *telemetry.Metrics, log *slog.Logger) (*servers, error) {
	s := &servers{log: log, list: []*server{
		{what: "health", setting: a.cfg.setting("healthz-bind-address"), addr: a.cfg.HealthzAddr, handler: telemetry.HealthHandler(health, m)},
		{what: "metrics", setting: a.cfg.setting("metrics-bind-address"), addr: a.cfg.MetricsAddr,
			handler: telemetry.MetricsHandler(m, a.cfg.ProxyMode, a.cfg.Profiling)},
	}}
	if err := s.open(ctx, a.cfg.BindHardFail); err != nil {
		s.close()
		return nil, err
	}
	log.Info("serving", "healthz", s.list[0].open.Addr(), "metrics", s.list[1].open.Addr())
	if a.serving != nil {
		a.serving(s.list[0].open.Addr(), s.list[1].open.Addr())
	}
	return s, nil
}

// pendingStatus answers health checks before the loop exists, since loading a dataplane
// takes a while. A proxy that starts is healthy until the source has listed all
// objects.
type pendingStatus struct {
	mu   sync.Mutex
	loop *reconcile.Reconciler
}

func (s *pendingStatus) set(loop *reconcile.Reconciler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loop = loop
}

func (s *pendingStatus) pending() (since, lastSynced time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loop == nil {
		return time.Time{}, time.Time{}
	}
	st := s.loop.Status()
	if !st.Listed {
		return time.Time{}, time.Time{} // it waits for the source, and a restart would not help
	}
	return st.PendingSince, st.LastSynced
}

func (s *pendingStatus) leaving() bool {
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
				err = errors.New("run agent: a part of it ended without an error")
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
	log.Info("agent stopped; the kernel continues to serve")
}

// newLogger returns a logger that writes to w. The levels are those of Kubernetes
// components, where -v 4 is for debugging.
func newLogger(w io.Writer, c Config) *slog.Logger {
	opts := &slog.HandlerOptions{Level: slog.LevelInfo}
	if c.Verbosity >= 4 {
		opts.Level = slog.LevelDebug
	}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
