package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Backend is the eBPF dataplane of one instance.
type Backend struct {
	cfg      Config
	objects  *objects
	features kernel.Features
	attacher *attach.Attacher
	stop     context.CancelFunc
	done     sync.WaitGroup
	attached bool
	stopNAT  func()            // stops Config.WatchNAT
	ipsec    *kernel.XfrmWatch // watches IPsec policies
	flows    flowCounts
	clients  *clientFlows // of the last sweep
	seed     uint32       // of the programs' hashes
	policies *untracked   // used only by the goroutine that writes policies
	ends     *socketEnds  // nil: no socket is ended
	loads    *loadTable   // nil: no Service chooses by load
	carriers *carriers    // nil: no endpoint on another node is probed
	rollback *rollback    // nil without Config.LeavePrevious

	facts        atomic.Pointer[podFacts] // nil before the first node
	serviceAddrs serviceAddrs
	services     serviceNames
	events       flowEvents
	active       serviceFlows

	portsMu  sync.Mutex // for the fields up to mu: the check loop runs beside writes
	ports    *portTable // only Apply and Replace write it
	known    bool       // ports was read from the maps, and no check has found a difference since
	doubt    dataplane.Repair
	repaired dataplane.Repair
	checks   chan struct{}
	drifted  chan struct{}
	unhook   chan struct{} // the pods without socket hooks have changed

	mu            sync.Mutex // for the fields below: interfaces change on their own
	node          *intent.Node
	written       *tcSettings // nil before the first node
	uplinks       map[int]attach.Uplink
	pods          map[netip.Addr]attach.Pod
	traversing    map[netip.Addr]traversal
	unwritten     map[netip.Addr]tcPod // entries of pods that did not fit
	untracking    bool                 // untracked_ports has entries
	snatPorts     []uint16
	clusterRanges map[tcRangeKey]bool
	xfrm          []kernel.XfrmPolicy // IPsec policies of this network namespace
	routesLeftOut bool                // route_mtus has no room for all routes
	askConntrack  bool                // netfilter may translate destinations: see Config.WatchNAT
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
	if err := claimPins(cfg.BPFFS); err != nil {
		return nil, err
	}
	b := &Backend{
		cfg: cfg, features: features, traversing: map[netip.Addr]traversal{},
		checks: make(chan struct{}, 1), drifted: make(chan struct{}, 1), unhook: make(chan struct{}, 1),
	}
	if b.objects, err = load(&b.cfg, features); err != nil {
		return nil, err
	}
	b.ports, b.seed = &portTable{}, b.objects.seed
	if b.carriers, err = newCarriers(b.m(tcMapDsrCarriers), &cfg); err != nil {
		b.objects.close()
		return nil, err
	}
	b.serviceAddrs.changed = b.noteFacts
	if b.pods, err = readPods(b.m(tcMapPods)); err != nil {
		b.objects.close()
		return nil, err
	}
	if b.clusterRanges, err = readClusterRanges(b.m(tcMapClusterRanges)); err != nil {
		b.objects.close()
		return nil, err
	}
	if b.policies, err = openUntracked(b.objects.maps, b.objects.filter); err != nil {
		b.objects.close()
		return nil, err
	}
	b.untracking = len(b.policies.have.ports) > 0
	if cfg.LeavePrevious {
		if b.rollback, err = prepareRollback(&cfg, features, b.objects); err != nil {
			b.objects.close()
			return nil, err
		}
	}
	b.attacher, err = attach.New(attach.Config{
		PinDir:      cfg.BPFFS,
		Programs:    b.objects.tcPrograms(),
		ForceClsact: cfg.ForceClsact,
		XDP:         b.objects.xdp(&cfg),
		OnUplinks:   b.onUplinks,
		OnRouteMTUs: b.onRouteMTUs,
		OnPods:      b.onPods,
		Facts:       b.fact,
		Owners:      maps.Clone(b.pods),
		OnRefused:   b.onRefused,
		OnError:     b.onInterfaceError,

		MaxRouteMTUs: int(b.m(tcMapRouteMtus).MaxEntries()),
	})
	if err != nil {
		b.rollback.close()
		b.objects.close()
		return nil, err
	}
	b.ipsec, err = kernel.WatchXfrm(b.onXfrm, func(err error) { cfg.Log.Error("Read IPsec policies", "err", err) })
	if err != nil {
		_ = b.attacher.Close()
		b.rollback.close()
		b.objects.close()
		return nil, err
	}
	b.ends, b.loads = b.openSocketEnds(), b.openLoads()
	b.followNAT()
	return b, nil
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

func (b *Backend) onInterfaceError(iface string, err error) {
	switch {
	case err == nil:
		b.cfg.Log.Info("Interface is served again", "interface", iface)
	case iface == "":
		b.cfg.Log.Error("Follow network interfaces", "err", err)
	default:
		b.cfg.Log.Error("Interface is not served", "interface", iface, "err", err)
	}
}

// m returns a map by its name in bpf/maps.h.
func (b *Backend) m(name string) *ebpf.Map { return b.objects.maps[name] }

// Name returns the value of --proxy-mode.
func (b *Backend) Name() string { return "ebpf" }

// CanCarry returns an error for a port that another dataplane must serve.
func (b *Backend) CanCarry(p *intent.ServicePort) error {
	return GivesAway(p.ID.Protocol, p.Helper)
}

// GivesAway returns why another dataplane must serve a port with this protocol and
// helper, or nil if the programs can.
func GivesAway(proto model.Protocol, helper intent.Helper) error {
	if proto != model.TCP && proto != model.UDP {
		return fmt.Errorf("the eBPF programs do not serve %s; nftables or iptables must", proto)
	}
	if helper == intent.FTP {
		// The stream contains addresses as text, so a translation would change its
		// length.
		return errors.New("FTP needs the kernel's conntrack helper, which only nftables and iptables can assign (if it is not FTP, annotate the Service with " +
			intent.HelperAnnotation + "=none)")
	}
	return nil
}

// PartEndpoints is the number of endpoints that are written in some tenths of a second.
func (b *Backend) PartEndpoints() int { return 1 << 15 }

// Apply writes the changes to the maps.
func (b *Backend) Apply(ctx context.Context, c intent.Changes) error {
	var node error
	if c.Node != nil {
		node = b.writeNode(c.Node)
	}
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	if b.ports.byID == nil { // the first call, without a Replace before it
		if err := b.reread(); err != nil {
			return errors.Join(node, err)
		}
	}
	failed, err := b.ports.update(ctx, c.Upserts, c.Deletes, false)
	if err != nil {
		return errors.Join(node, err)
	}
	return dataplane.NodeErrorOf(node, failed)
}

// Replace writes this state to the maps and removes everything else. The first call
// also attaches the programs: after the maps are written, or before that if no program
// of an earlier run serves a Service. Programs that lack what protects are not attached.
func (b *Backend) Replace(ctx context.Context, s intent.State) error {
	node := b.writeNode(&s.Node)
	defer b.askCheck()
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	if err := b.reread(); err != nil {
		return errors.Join(node, err)
	}
	if node == nil && b.begins() {
		if err := b.attach(ctx); err != nil {
			return err
		}
	}
	failed, err := b.ports.replace(ctx, s.Ports)
	if err != nil {
		return errors.Join(node, err)
	}
	if node != nil && !b.attached {
		return node
	}
	if err := b.attach(ctx); err != nil {
		return errors.Join(node, err)
	}
	return dataplane.NodeErrorOf(node, failed)
}

// begins reports whether no earlier run has served Services here. The kernel attaches
// the programs one by one. Programs that know no Service leave all packets to the
// current proxy, so no request is translated at one interface while its reply arrives
// at another that has no program yet. Filters (before 6.6) do not show which instance
// they belong to.
func (b *Backend) begins() bool {
	return !b.attached && len(b.ports.byID) == 0 && b.attacher.Mechanism() == "tcx" && !attach.Attached(b.cfg.BPFFS)
}

// reread reads the maps if their content is unknown, or a check found a difference.
// Only this agent writes them, but Replace must not depend on that: hence the checks.
// The caller holds portsMu.
func (b *Backend) reread() error {
	if b.known {
		return nil
	}
	fresh, err := readPorts(b.objects.maps, b.objects.filter)
	if err != nil {
		return err
	}
	fresh.names, fresh.ends = &b.services, b.ends
	fresh.inherit(b.ports)
	fresh.addrs = &b.serviceAddrs
	b.serviceAddrs.reset(fresh.owners)
	// An earlier run may have been killed before it counted its last write.
	fresh.changed = true
	fresh.countChange()
	b.ports, b.known = fresh, true
	b.repaired.Add(b.doubt)
	b.doubt = dataplane.Repair{}
	return nil
}

// attach attaches the programs to their hooks, and starts the goroutines that keep them
// there.
func (b *Backend) attach(ctx context.Context) error {
	if b.attached {
		return nil
	}
	created := flowsCreated(b.m(tcMapVerdicts))
	b.migrate(beforeSwitch)
	stop := b.objects.migrator.meanwhile(func() error { return b.objects.migrator.migrate(b.objects.maps, duringSwitch) })
	if err := b.attacher.Sync(ctx); err != nil {
		// OnError has reported each failed interface; the others are served.
		b.cfg.Log.Error("Attach to interfaces", "err", err)
	}
	err := b.attachSockets()
	stop()
	if err != nil {
		return fmt.Errorf("attach socket hooks: %w", err)
	}
	b.migrate(afterSwitch)
	if b.objects.migrator != nil {
		b.cfg.Log.Info("Flows of the previous maps are copied", "openedMeanwhile", flowsCreated(b.m(tcMapVerdicts))-created)
	}
	// The earlier run's programs, which may not have used the filter, have added flows.
	if err := b.objects.filter.fill(b.objects.maps); err != nil {
		return err
	}
	retireLayouts(b.cfg.BPFFS, abiVersion)
	if err := removeEarlierRanges(b.m(tcMapSourceRanges)); err != nil {
		b.cfg.Log.Warn("Prefixes that an earlier agent wrote are left among source ranges", "err", err)
	}
	b.attached = true
	run, stop := context.WithCancel(context.Background())
	b.stop = stop
	b.done.Go(func() {
		if err := b.attacher.Run(run); err != nil && run.Err() == nil {
			b.cfg.Log.Error("Follow network interfaces", "err", err)
		}
	})
	b.done.Go(func() { b.sweepLoop(run) })
	b.done.Go(func() { b.beatLoop(run) })
	b.done.Go(func() { b.probeLoop(run) })
	b.done.Go(func() { b.checkLoop(run) })
	b.done.Go(func() { b.unhookLoop(run) })
	b.done.Go(func() { b.endLoop(run) })
	b.cfg.Log.Info("eBPF dataplane attached", "mechanism", b.attacher.Mechanism(),
		"cgroup", b.cfg.CgroupRoot, "socketHooks", b.cfg.SocketHooks, "bpffs", b.cfg.BPFFS)
	return nil
}

// attachSockets attaches the socket hooks, or detaches those of an earlier run.
func (b *Backend) attachSockets() error {
	if b.cfg.SocketHooks == HooksOff {
		return attach.DetachCgroup(b.cfg.BPFFS)
	}
	return attach.AttachCgroup(b.cfg.BPFFS, b.cfg.CgroupRoot, b.objects.socketPrograms())
}

// migrate copies the recent entries of the earlier run's programs.
func (b *Backend) migrate(when phase) {
	if err := b.objects.migrator.migrate(b.objects.maps, when); err != nil {
		b.cfg.Log.Warn("Flows of the last moments are lost", "reason", err)
	}
}

// Close closes maps, programs and links. The pinned ones go on serving: with
// Config.LeavePrevious those of the release before.
func (b *Backend) Close() error {
	b.stopNAT()
	_ = b.ipsec.Close()
	if b.stop != nil {
		b.stop()
	}
	b.done.Wait()
	err := errors.Join(b.stopEvents(), b.attacher.Close())
	if b.rollback != nil {
		// The release before has no XDP program, and would not keep its maps.
		err = errors.Join(err, attach.UnpinXDP(b.cfg.BPFFS), b.rollback.leave(b.attached))
		b.rollback.close()
	}
	b.ends.close()
	b.loads.close()
	b.objects.close()
	return err
}
