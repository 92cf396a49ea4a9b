package ebpf

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/donottrack"
	"spillway.dev/spillway/internal/dataplane/ebpf/dsr"
	"spillway.dev/spillway/internal/dataplane/ebpf/flows"
	"spillway.dev/spillway/internal/dataplane/ebpf/node"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/services"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Backend is the eBPF dataplane of one instance. It wires the parts, and has the order of writes.
type Backend struct {
	cfg            Config
	objects        *objects.Objects
	attacher       *attach.Attacher
	node           *node.Writer
	services       *services.Writer
	flows          *flows.Table
	policies       *donottrack.Maps    // used only by the goroutine that writes policies
	encapsulations *dsr.Encapsulations // nil: no endpoint on another node is probed
	migrator       *upgrade.Migrator   // nil if there is nothing to migrate
	rollback       *upgrade.Rollback   // nil without Config.LeavePrevious
	attached       atomic.Bool
	running        running
}

// running are the goroutines of a Backend.
type running struct {
	stop context.CancelFunc // nil before attach
	done sync.WaitGroup
}

var _ dataplane.Partial = (*Backend)(nil)

// New loads the programs and takes over the maps of an earlier run. The hooks switch to
// the new programs at the first Replace, when the maps have the data of the new
// programs. An error is one line that names what the machine lacks.
func New(ctx context.Context, cfg Config) (*Backend, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure dataplane ebpf: %w", err)
	}
	features, err := probe(&cfg)
	if err != nil {
		return nil, err
	}
	if err := upgrade.SetPinOwner(cfg.BPFFS); err != nil {
		return nil, err
	}
	b := &Backend{cfg: cfg}
	if b.objects, b.migrator, err = upgrade.Open(&b.cfg, features); err != nil {
		return nil, err
	}
	if err := b.open(); err != nil {
		b.rollback.Close()
		b.objects.Close()
		return nil, err
	}
	return b, nil
}

// makeParts makes the parts that need no more than the maps.
func (b *Backend) makeParts() {
	b.services = services.New(b.objects, b.cfg.Log)
	b.node = node.New(&b.cfg, b.objects, b.services.HasAddr, b.noteFacts)
	b.flows = flows.New(&b.cfg, b.objects, b.services)
	b.node.OnSourcesLost(b.flows.ForgetSources)
	b.node.OnEgressKept(b.flows.WatchEgressTo)
	b.services.OnChanges(b.noteFacts, b.flows.EndpointsRemoved)
	b.services.OnNewID(b.flows.ServiceAdded)
}

// open opens the parts in the order in which they depend on each other.
func (b *Backend) open() (err error) {
	b.makeParts()
	if b.encapsulations, err = dsr.New(b.m(objects.TCMapDsrEncapsulations), &b.cfg); err != nil {
		return err
	}
	if err = b.openPolicies(); err != nil {
		return err
	}
	if err = b.node.Read(b.policies.Any()); err != nil {
		return err
	}
	if b.cfg.LeavePrevious {
		if b.rollback, err = upgrade.PrepareRollback(&b.cfg, b.objects.Features, b.objects); err != nil {
			return err
		}
	}
	if b.attacher, err = b.newAttacher(); err != nil {
		return err
	}
	if err = b.node.Watch(); err != nil {
		_ = b.attacher.Close()
		return err
	}
	b.flows.Open()
	return nil
}

func probe(cfg *Config) (kernel.Features, error) {
	if err := kernel.EnsureBPFFS(cfg.BPFFS); err != nil {
		return kernel.Features{}, err
	}
	// Without conntrack there are no connections to look up.
	_ = kernel.LoadConntrack()
	place := kernel.Place{BPFFS: cfg.BPFFS, CgroupRoot: cfg.CgroupRoot}
	if cfg.SocketHooks == HooksOff {
		place.CgroupRoot = "" // none is needed
	}
	features, err := kernel.Probe(place)
	if err != nil {
		return features, err
	}
	return features, features.Err()
}

// m returns a map by its name in bpf/maps.h.
func (b *Backend) m(name string) *ebpf.Map { return b.objects.Maps[name] }

// Name returns the value of --proxy-mode.
func (b *Backend) Name() string { return "ebpf" }

// CanCarry returns an error for a port that another dataplane must serve.
func (b *Backend) CanCarry(p *intent.ServicePort) error {
	return NeedsFallback(p.ID.Protocol, p.Helper)
}

// NeedsFallback returns why another dataplane must serve a port with this protocol and
// helper, or nil if the programs can.
func NeedsFallback(proto model.Protocol, helper intent.Helper) error {
	if proto != model.TCP && proto != model.UDP {
		return fmt.Errorf("the eBPF programs do not serve %s; nftables or iptables must", proto)
	}
	if helper == intent.FTP {
		// The stream contains addresses as text, so a translation would change its
		// length.
		return errors.New("FTP needs the kernel's conntrack helper, which only nftables and iptables can assign " +
			"(if it is not FTP, annotate the Service with " + intent.HelperAnnotation + "=none)")
	}
	return nil
}

// PartEndpoints is the number of endpoints that are written in some tenths of a second.
func (b *Backend) PartEndpoints() int { return 1 << 15 }

// Apply writes the changes to the maps.
func (b *Backend) Apply(ctx context.Context, c intent.Changes) error {
	var node error
	if c.Node != nil {
		node = b.node.Write(c.Node)
	}
	failed, err := b.services.Update(ctx, c.Upserts, c.Deletes)
	if err != nil {
		return errors.Join(node, err)
	}
	return dataplane.NodeErrorOf(node, failed)
}

// Replace writes this state to the maps and removes everything else. The first call
// also attaches the programs: after the maps are written, or before that if no program
// of an earlier run serves a Service. Programs that lack what protects are not attached.
func (b *Backend) Replace(ctx context.Context, s intent.State) error {
	node := b.node.Write(&s.Node)
	defer b.services.RequestCheck()
	empty, err := b.services.Empty()
	if err != nil {
		return errors.Join(node, err)
	}
	if node == nil && empty && b.begins() {
		if err := b.attach(ctx); err != nil {
			return err
		}
	}
	failed, err := b.services.Replace(ctx, s.Ports)
	if err != nil {
		return errors.Join(node, err)
	}
	if node != nil && !b.attached.Load() {
		return node
	}
	if err := errors.Join(b.node.EndDraining(), b.attach(ctx)); err != nil {
		return errors.Join(node, err)
	}
	return dataplane.NodeErrorOf(node, failed)
}

// begins reports whether no earlier run has attached programs here. The kernel attaches
// the programs one by one. Programs that know no Service leave all packets to the
// current proxy, so no request is translated at one interface while its reply arrives
// at another that has no program yet. Filters (before 6.6) do not show which instance
// they belong to.
func (b *Backend) begins() bool {
	return !b.attached.Load() && b.attacher.Mechanism() == "tcx" && !attach.Attached(b.cfg.BPFFS)
}

// attach attaches the programs to their hooks, and starts the goroutines that keep them
// there.
func (b *Backend) attach(ctx context.Context) error {
	if b.attached.Load() {
		return nil
	}
	created := objects.FlowsCreated(b.m(objects.TCMapVerdicts))
	b.migrate(upgrade.BeforeSwitch)
	stop := b.migrator.RepeatPass(func() error { return b.migrator.Migrate(b.objects.Maps, upgrade.DuringSwitch) })
	if err := b.attacher.Sync(ctx); err != nil {
		// OnError has reported each failed interface; the others are served.
		b.cfg.Log.Error("Attach to interfaces", "err", err)
	}
	err := b.attachSockets()
	stop()
	if err != nil {
		return fmt.Errorf("attach socket hooks: %w", err)
	}
	b.migrate(upgrade.AfterSwitch)
	if b.migrator != nil {
		b.cfg.Log.Info("Flows of the previous maps are copied", "openedMeanwhile", objects.FlowsCreated(b.m(objects.TCMapVerdicts))-created)
	}
	// The earlier run's programs, which may not have used the filter, have added flows.
	if err := b.objects.Filter.Fill(b.objects.Maps); err != nil {
		return err
	}
	upgrade.RetireLayouts(b.cfg.BPFFS, objects.ABIVersion)
	if err := upgrade.RemoveEarlierRanges(b.m(objects.TCMapSourceRanges)); err != nil {
		b.cfg.Log.Warn("Prefixes that an earlier agent wrote are left among source ranges", "err", err)
	}
	b.attached.Store(true)
	run, stop := context.WithCancel(context.Background())
	b.running.stop = stop
	b.running.done.Go(func() {
		if err := b.attacher.Run(run); err != nil && run.Err() == nil {
			b.cfg.Log.Error("Follow network interfaces", "err", err)
		}
	})
	b.running.done.Go(func() { b.flows.Run(run) })
	b.running.done.Go(func() { b.node.Run(run) })
	b.running.done.Go(func() { b.services.Run(run) })
	b.running.done.Go(func() { b.encapsulations.Run(run, b.dsrElsewhere) })
	b.cfg.Log.Info("eBPF dataplane attached", "mechanism", b.attacher.Mechanism(),
		"cgroup", b.cfg.CgroupRoot, "socketHooks", b.cfg.SocketHooks, "bpffs", b.cfg.BPFFS)
	return nil
}

// attachSockets attaches the socket hooks, or detaches those of an earlier run.
func (b *Backend) attachSockets() error {
	if b.cfg.SocketHooks == HooksOff {
		return attach.DetachCgroup(b.cfg.BPFFS)
	}
	return attach.AttachCgroup(b.cfg.BPFFS, b.cfg.CgroupRoot, b.objects.SocketPrograms())
}

// migrate copies the recent entries of the earlier run's programs.
func (b *Backend) migrate(when upgrade.Phase) {
	if err := b.migrator.Migrate(b.objects.Maps, when); err != nil {
		b.cfg.Log.Warn("Flows of the last moments are lost", "reason", err)
	}
}

// Close closes maps, programs and links. The pinned ones go on serving: with
// Config.LeavePrevious those of the release before.
func (b *Backend) Close() error {
	b.node.Close()
	if b.running.stop != nil {
		b.running.stop()
	}
	b.running.done.Wait()
	err := errors.Join(b.flows.StopEvents(), b.attacher.Close())
	if b.rollback != nil {
		// The release before has no XDP program, and would not keep its maps.
		err = errors.Join(err, attach.UnpinXDP(b.cfg.BPFFS), b.rollback.Leave(b.attached.Load(), b.attachPrevious))
		b.rollback.Close()
	}
	b.flows.Close()
	b.objects.Close()
	return err
}
