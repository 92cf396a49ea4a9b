// Package reconcile makes the kernel hold what package decisions decides. It owns timing,
// retries, the assignment of Service ports to dataplanes, and the reports of errors.
//
//	source ──Deliver──> queue ──> Tracker ─┬─> backend syncs ──> Backend.Apply / Replace
//	kernel ─SetNodeAddrs─┘                 ├─> doNotTrackSync ──> DoNotTrack, Bypass
//	                                       └─> healthCheckNodePorts, problems, status
//
// The goroutine of Run owns the tracker and the backends. Other goroutines only add
// changes to the queue, where a newer change of an object replaces an older one: a slow
// backend makes syncs rarer, not memory larger.
package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/telemetry"
)

// Tracker turns facts into decisions; the agent uses *decisions.Tracker.
type Tracker interface {
	// Apply records the facts that a source delivered, and returns what it changed.
	Apply(model.Delta) decisions.Changes
	// SetNodeAddrs records the node's own addresses, complete each time.
	SetNodeAddrs([]netip.Addr) decisions.Changes
	// SetEgress records what connections of pods to the outside depend on beside the node.
	SetEgress(egress.Mode, egress.Facts) decisions.Changes
	// SetTime records the time, and returns what it changes.
	SetTime(time.Time) decisions.Changes
	// NextStep returns when SetTime changes something next.
	NextStep() (at time.Time, any bool)
	// Observe records the outcomes of handshakes and the results of checks, and returns what
	// they change.
	Observe(time.Time, []outlier.Outcome, []outlier.Result) decisions.Changes
	// Checks returns the endpoints that the agent must connect to now.
	Checks(time.Time) []outlier.Check
	// SetKernel records what the kernel holds, and returns what that changes.
	SetKernel(decisions.Kernel) decisions.Changes
	// State returns the whole desired state of Services.
	State() intent.State
	// Services returns the tracker of Services, which the loop only reads; see inspect.go.
	Services() *intent.Tracker
	// Policies returns the tracker of do-not-track policies.
	Policies() *donottrack.Tracker
}

// HealthChecks answers on the healthCheckNodePorts of Services.
type HealthChecks interface {
	// Update makes the changes, listens on the given addresses and tries again
	// what failed before. It returns what is wrong now, nil when nothing is.
	Update(addrs []netip.Addr, changed []intent.HealthCheck) []model.Problem
}

// Config configures a Reconciler; see Validate.
type Config struct {
	Tracker Tracker
	// Backends are the dataplanes of this node, the chosen one first. The first that
	// can carry a Service port serves it.
	Backends []dataplane.Backend
	// SyncPeriod is the time between full syncs.
	SyncPeriod time.Duration
	// MinSyncPeriod is the minimum time between the starts of two syncs; one sync
	// writes all changes that arrive in between.
	MinSyncPeriod time.Duration
	// OnFirstSync, if not nil, runs once in Run's goroutine, when the kernel holds the
	// whole desired state for the first time.
	OnFirstSync func(context.Context)
	// OnProblems, if not nil, receives new problems in Run's goroutine. It must not
	// block.
	OnProblems func([]model.Problem)
	// Policies writes do-not-track policies; nil if the agent applies none.
	Policies dataplane.DoNotTrack
	// Bypass is the backend whose untracked packets bypass netfilter; nil if no backend
	// can do so.
	Bypass dataplane.Bypass
	// OnDoNotTrack, if not nil, receives which parts of policies do not hold on this
	// node, and why a write failed: at the start and after each change. It must not
	// block.
	OnDoNotTrack func(refused []model.PolicyRefusal, failed error)

	// Connect opens a TCP connection to an endpoint and closes it; nil: by the agent's network
	// namespace. Any goroutine may call it.
	Connect func(context.Context, netip.AddrPort) error

	StaleEntries StaleEntries       // nil: stale conntrack entries stay
	HealthChecks HealthChecks       // nil: no healthCheckNodePort answers
	Metrics      *telemetry.Metrics // nil: metrics are not collected
	Logger       *slog.Logger       // nil: slog.Default()
}

// Validate returns an error if a field is missing or out of range.
func (c Config) Validate() error {
	switch {
	case c.Tracker == nil:
		return errors.New("no tracker")
	case len(c.Backends) == 0:
		return errors.New("no backend")
	case c.SyncPeriod <= 0:
		return errors.New("the sync period must be longer than 0")
	case c.MinSyncPeriod < 0 || c.MinSyncPeriod > c.SyncPeriod:
		return errors.New("the min sync period must be between 0 and the sync period")
	}
	return nil
}

// healthCheckRetry is the time between attempts to listen on a healthCheckNodePort that
// another program uses.
const healthCheckRetry = 5 * time.Second

// Reconciler is the loop between sources and dataplanes. Make one with New.
type Reconciler struct {
	cfg       Config
	log       *slog.Logger
	metrics   *telemetry.Metrics
	queue     *queue
	started   time.Time
	questions chan func() // questions for Run's goroutine; see inspect.go

	// Only Run's goroutine uses the fields below.
	syncs        []*backendSync
	policies     *doNotTrackSync // nil: there are none
	assignments  map[intent.PortID]assignment
	counters     counters
	fellBack     []fallback // not logged yet
	entries      pendingStale
	handshakes   handshakes
	node         intent.Node
	egressMode   egress.Mode
	haveFull     bool // the source's first Full delta is in
	haveAddrs    bool // the node's addresses are in
	lastStart    time.Time
	nextFullSync time.Time
	checks       map[model.Name]intent.HealthCheck // changed, not yet passed on
	checksAt     time.Time                         // when to try HealthChecks again; zero: not needed
	arrival      time.Time                         // of the changes that are being drained
	pendingSince time.Time                         // arrival of the oldest change that is not in the kernel yet
	pendingSvcs  int                               // Services among the changes not in the kernel
	pendingEps   int                               // slices among them
	problems     problems
	synced       bool // a sync of everything has succeeded once

	mu     sync.Mutex
	status Status
}

// New returns a Reconciler; Run starts it.
func New(cfg Config) (*Reconciler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Connect == nil {
		cfg.Connect = connect
	}
	if cfg.Metrics == nil {
		cfg.Metrics = telemetry.NewMetrics(telemetry.Build{})
	}
	r := &Reconciler{
		cfg:         cfg,
		log:         cfg.Logger,
		metrics:     cfg.Metrics,
		queue:       newQueue(),
		started:     time.Now(),
		questions:   make(chan func()),
		assignments: map[intent.PortID]assignment{},
		checks:      map[model.Name]intent.HealthCheck{},
		entries:     pendingStale{gone: map[intent.PortID]struct{}{}},
		handshakes:  newHandshakes(&cfg),
		counters: counters{
			perBackend: make([]int, len(cfg.Backends)),
			unassigned: map[intent.PortID]error{},
		},
	}
	r.problems.log, r.problems.onAppeared = r.log, cfg.OnProblems
	if cfg.Policies != nil {
		r.policies = newDoNotTrackSync(&cfg)
		if cfg.Bypass != nil && !cfg.Bypass.Serves() {
			r.setKernel(decisions.ServicesForeign)
		}
	}
	for _, b := range cfg.Backends {
		// The state that an earlier run left is unknown, so each backend starts
		// with a full sync.
		r.syncs = append(r.syncs, newBackendSync(b))
	}
	return r, nil
}

// Deliver queues the facts of a source and the complete list of the source's problems; nil
// means that the problems are unchanged. Deliver does not wait for the kernel. Any
// goroutine may call it. It has the signature of the sources' callback.
func (r *Reconciler) Deliver(d model.Delta, problems []model.Problem) {
	r.queue.deliver(d, problems, time.Now())
	r.metrics.ChangesQueued(len(d.Services), len(d.Slices), time.Now())
}

// SetNodeAddrs queues the node's own addresses. Like Deliver it does not wait, and any
// goroutine may call it.
func (r *Reconciler) SetNodeAddrs(addrs []netip.Addr) {
	r.queue.setAddrs(addrs, time.Now())
}

// SetEgress queues what connections of pods to the outside depend on. Like Deliver it does not wait, and
// any goroutine may call it.
func (r *Reconciler) SetEgress(mode egress.Mode, facts egress.Facts) {
	r.queue.setEgress(mode, facts, time.Now())
}

// SetServerProblems queues the complete list of what is wrong with the agent's own servers.
// Like Deliver it does not wait, and any goroutine may call it.
func (r *Reconciler) SetServerProblems(problems []model.Problem) {
	r.queue.setServing(problems, time.Now())
}

// Run writes to the kernel until ctx ends, then returns nil. The first write waits for the
// source's first full Delta and for the node's addresses: a sync of incomplete facts would
// delete Services that running flows use.
func (r *Reconciler) Run(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var watches sync.WaitGroup
	defer watches.Wait()
	for _, bs := range r.syncs {
		watches.Go(func() { r.watch(ctx, bs.backend, &bs.drift) })
	}
	if ps := r.policies; ps != nil {
		watches.Go(func() { r.watch(ctx, ps.table, &ps.drift) })
	}
	for {
		r.runDue(ctx)
		timer.Reset(time.Until(r.nextDue()))
		if !r.wait(ctx, timer.C) {
			return nil
		}
	}
}

// wait answers questions until the next turn is due. It returns false when ctx has ended.
func (r *Reconciler) wait(ctx context.Context, due <-chan time.Time) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-r.queue.wake:
			return true
		case <-due:
			return true
		case answer := <-r.questions:
			answer()
		}
	}
}

// ready reports whether enough is known to write to the kernel.
func (r *Reconciler) ready() bool { return r.haveFull && r.haveAddrs }

// earliestSync returns the earliest time for the next sync.
func (r *Reconciler) earliestSync() time.Time {
	if r.lastStart.IsZero() {
		return r.started
	}
	return r.lastStart.Add(r.cfg.MinSyncPeriod)
}

// runDue does the work that is due: it drains the queue, syncs and reports.
func (r *Reconciler) runDue(ctx context.Context) {
	now := time.Now()
	if now.Before(r.earliestSync()) || ctx.Err() != nil {
		return
	}
	fullSync := r.ready() && !now.Before(r.fullSyncAt())
	if fullSync {
		r.planFullSync(now)
	}
	r.drainQueue()
	if r.ready() {
		r.watchHandshakes(ctx, now)
		r.planRepairs(now)
		if r.policies != nil {
			r.policies.plan(now, fullSync)
		}
		if r.nextFullSync.IsZero() {
			r.nextFullSync = now.Add(r.cfg.SyncPeriod)
		}
		r.syncPolicies(ctx, now)
		r.syncBackends(ctx, now)
		r.releasePolicies(ctx, now)
		r.updateHealthChecks(now)
	}
	if ctx.Err() == nil {
		r.publish()
	}
}

// fullSyncAt returns when to write everything. Changes that wait for their parts of a sync
// are written first, but not for longer than another SyncPeriod.
func (r *Reconciler) fullSyncAt() time.Time {
	if slices.ContainsFunc(r.syncs, func(bs *backendSync) bool { return len(bs.pending) > 0 }) {
		return r.nextFullSync.Add(r.cfg.SyncPeriod)
	}
	return r.nextFullSync
}

// drainQueue passes the queued changes to the tracker, and marks what the backends must
// write.
func (r *Reconciler) drainQueue() {
	pending := r.queue.drain()
	r.enqueue(r.cfg.Tracker.SetTime(time.Now()))
	r.arrival = pending.since
	if r.arrival.IsZero() {
		r.arrival = time.Now()
	}
	if !pending.since.IsZero() && r.pendingSince.IsZero() {
		r.pendingSince = pending.since
		r.mu.Lock()
		r.status.PendingSince = pending.since // visible during the sync
		r.mu.Unlock()
	}
	if pending.problems != nil {
		r.problems.set(fromSource, *pending.problems)
	}
	if pending.serving != nil {
		r.problems.set(fromServers, *pending.serving)
	}
	if pending.addrs != nil {
		r.haveAddrs = true
		r.enqueue(r.cfg.Tracker.SetNodeAddrs(*pending.addrs))
	}
	if pending.egress != nil {
		r.egressMode = pending.egress.mode
		r.enqueue(r.cfg.Tracker.SetEgress(pending.egress.mode, pending.egress.facts))
	}
	if pending.delta != nil {
		if pending.delta.Full && !r.haveFull {
			r.haveFull, r.pendingSince = true, pending.since // earlier changes waited for this Delta
			r.mu.Lock()
			r.status.Listed, r.status.PendingSince = true, pending.since
			r.mu.Unlock()
		}
		r.pendingSvcs += len(pending.delta.Services)
		r.pendingEps += len(pending.delta.Slices)
		r.enqueue(r.cfg.Tracker.Apply(*pending.delta))
		if r.policies != nil {
			r.policies.onUnread(pending.delta)
			r.setKernel(decisions.ServicesPending)
		}
		r.metrics.SetPending(r.pendingSvcs, r.pendingEps) // visible during the sync
	}
}

// enqueue stores changes for the next sync. It writes nothing.
func (r *Reconciler) enqueue(c decisions.Changes) {
	if r.policies != nil {
		r.policies.enqueue(c.Policies)
	}
	if c.Egress != nil {
		r.problems.set(fromEgress, c.Egress)
	}
	r.enqueueServices(c.Services)
}

func (r *Reconciler) enqueueServices(c intent.Changes) {
	for _, id := range c.Deletes {
		r.unassign(id)
	}
	for _, p := range c.Upserts {
		r.assign(p)
	}
	for _, bs := range r.syncs {
		bs.enqueueMoves(c.Moves)
	}
	if c.Node != nil {
		r.node, r.entries.node = *c.Node, c.Node
		for _, bs := range r.syncs {
			bs.setNode(c.Node)
		}
	}
	if r.cfg.HealthChecks != nil && (c.Node != nil || len(c.HealthChecks) > 0) {
		for _, hc := range c.HealthChecks {
			r.checks[hc.Service] = hc
		}
		r.checksAt = r.started // at once
	}
	if c.Problems != nil {
		r.problems.set(fromIntent, c.Problems)
	}
}

// syncPolicies writes policies, if anything is due.
func (r *Reconciler) syncPolicies(ctx context.Context, now time.Time) {
	if r.policies != nil && ctx.Err() == nil {
		r.policies.sync(ctx, now)
		r.setKernel(decisions.ServicesPending)
	}
}

// setKernel tells the tracker what the kernel holds.
func (r *Reconciler) setKernel(services decisions.ServicesHeld) {
	r.enqueue(r.cfg.Tracker.SetKernel(decisions.Kernel{Services: services, DenyRulesUnknown: r.policies.denyRulesUnknown()}))
}

// releasePolicies writes the policies that the NAT of Services had blocked, after the sync
// of Services.
func (r *Reconciler) releasePolicies(ctx context.Context, now time.Time) {
	if r.policies == nil || ctx.Err() != nil {
		return
	}
	switch {
	case r.allWritten():
		r.setKernel(decisions.ServicesWritten)
	case slices.ContainsFunc(r.syncs, func(bs *backendSync) bool { return bs.lasting() != nil }):
		r.setKernel(decisions.ServicesFailing)
	}
	r.syncPolicies(ctx, now)
}

func (r *Reconciler) checksDue() (time.Time, bool) { return orNever(r.checksAt) }

// updateHealthChecks passes on changed health checks. It runs after the sync, so that a
// load balancer learns of an endpoint when the kernel has it.
func (r *Reconciler) updateHealthChecks(now time.Time) {
	if !passed(r.checksAt, now) {
		return
	}
	changed := make([]intent.HealthCheck, 0, len(r.checks))
	for _, hc := range r.checks {
		changed = append(changed, hc)
	}
	clear(r.checks)
	ps := r.cfg.HealthChecks.Update(r.node.NodePortAddrs, changed)
	r.problems.set(fromHealthChecks, ps)
	r.checksAt = time.Time{}
	if len(ps) > 0 {
		r.checksAt = now.Add(healthCheckRetry)
	}
}
