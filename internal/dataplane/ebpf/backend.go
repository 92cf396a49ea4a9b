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
	attacher *attach.Attacher
	stop     context.CancelFunc
	done     sync.WaitGroup
	attached bool
	stopNAT  func()            // ends Config.WatchNAT
	ipsec    *kernel.XfrmWatch // follows IPsec policies
	flows    flowCounts
	seed     uint32     // of the programs' hashes
	policies *untracked // used by who writes policies alone

	facts        atomic.Pointer[podFacts] // nil before the first node
	serviceAddrs serviceAddrs

	portsMu  sync.Mutex // for what is below up to the next: the maps are checked beside writes
	ports    *portTable // written by Apply and Replace only
	known    bool       // ports was read from the maps, and no check has found it wrong since
	doubt    dataplane.Repair
	repaired dataplane.Repair
	checks   chan struct{}
	drifted  chan struct{}

	mu            sync.Mutex // for all below: interfaces change on their own
	node          *intent.Node
	uplinks       map[int]attach.Uplink
	pods          map[netip.Addr]attach.Pod
	policed       map[netip.Addr]traversal
	untracking    bool // there are untracked ports
	snatPorts     []uint16
	clusterRanges map[tcRangeKey]bool
	xfrm          []kernel.XfrmPolicy // IPsec policies of this network namespace
	askConntrack  bool                // netfilter may translate destinations: see Config.WatchNAT
}

var _ dataplane.Backend = (*Backend)(nil)

// New loads the programs, taking over the maps of an earlier run. Hooks change
// hands at the first Replace, when the maps hold what the new programs need.
// Its error is one line that says what the machine lacks.
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
		cfg: cfg, policed: map[netip.Addr]traversal{},
		checks: make(chan struct{}, 1), drifted: make(chan struct{}, 1),
	}
	if b.objects, err = load(&cfg, features); err != nil {
		return nil, err
	}
	b.ports, b.seed = &portTable{}, b.objects.seed
	b.serviceAddrs.changed = b.noteFacts
	if b.pods, err = readPods(b.m(tcMapPods)); err != nil {
		b.objects.close()
		return nil, err
	}
	if b.clusterRanges, err = readClusterRanges(b.m(tcMapSourceRanges)); err != nil {
		b.objects.close()
		return nil, err
	}
	if b.policies, err = openUntracked(b.objects.maps); err != nil {
		b.objects.close()
		return nil, err
	}
	b.untracking = len(b.policies.have.ports) > 0
	b.attacher, err = attach.New(attach.Config{
		PinDir:      cfg.BPFFS,
		Programs:    b.objects.tcPrograms(),
		ForceClsact: cfg.ForceClsact,
		OnUplinks:   b.onUplinks,
		OnPods:      b.onPods,
		Facts:       b.fact,
		Owners:      maps.Clone(b.pods),
		OnRefused:   b.onRefused,
		OnError:     b.onInterfaceError,
	})
	if err != nil {
		b.objects.close()
		return nil, err
	}
	b.ipsec, err = kernel.WatchXfrm(b.onXfrm, func(err error) { cfg.Log.Error("Read IPsec policies", "err", err) })
	if err != nil {
		_ = b.attacher.Close()
		b.objects.close()
		return nil, err
	}
	b.followNAT()
	return b, nil
}

// followNAT has the programs ask conntrack about packets of endpoints as long as
// netfilter may translate destinations here. Netfilter must see both directions of a
// connection that it translates: the answer of an endpoint that is also a pod with a
// hostPort is for netfilter to translate back.
func (b *Backend) followNAT() {
	b.stopNAT = func() {}
	if b.cfg.WatchNAT == nil {
		return
	}
	stop, err := b.cfg.WatchNAT(b.onNAT)
	if err != nil {
		// To ask about each packet is slower, but right.
		b.cfg.Log.Error("Follow netfilter's rules", "err", err)
		b.onNAT(true, "rules are not followed")
		return
	}
	b.stopNAT = stop
}

// onNAT is called when netfilter begins or ceases to translate destinations.
func (b *Backend) onNAT(may bool, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if may != b.askConntrack {
		if may {
			b.cfg.Log.Info("netfilter may translate destinations: packets of endpoints are looked up in conntrack", "reason", reason)
		} else {
			b.cfg.Log.Info("netfilter translates no destinations: packets of endpoints are not looked up in conntrack")
		}
	}
	b.askConntrack = may
	if b.node == nil {
		return // the first Replace writes settings
	}
	if err := b.writeSettings(b.node); err != nil {
		b.cfg.Log.Error("Write settings", "err", err)
	}
}

func probe(cfg *Config) (kernel.Features, error) {
	if err := kernel.EnsureBPFFS(cfg.BPFFS); err != nil {
		return kernel.Features{}, err
	}
	// Where there is none, there are no connections to ask for.
	_ = kernel.LoadConntrack()
	features, err := kernel.Probe(kernel.Place{BPFFS: cfg.BPFFS, CgroupRoot: cfg.CgroupRoot})
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

// m gives a map by its name in bpf/maps.h.
func (b *Backend) m(name string) *ebpf.Map { return b.objects.maps[name] }

// Name is the value of --proxy-mode.
func (b *Backend) Name() string { return "ebpf" }

// CanCarry refuses what the programs do not parse.
func (b *Backend) CanCarry(p *intent.ServicePort) error { return GivesAway(p.ID.Protocol, p.Helper) }

// GivesAway says why a port of this protocol, with this helper, is for another dataplane
// to serve; nil: it is not.
func GivesAway(proto model.Protocol, helper intent.Helper) error {
	if proto != model.TCP && proto != model.UDP {
		return fmt.Errorf("%s is for nftables or iptables to serve, not for the eBPF programs", proto)
	}
	if helper == intent.FTP {
		// Addresses stand in the stream as text: what is translated has another length.
		return errors.New("FTP takes the kernel's helper, which is for nftables or iptables to assign, not for the eBPF programs (if it is not FTP, annotate the Service with " +
			intent.HelperAnnotation + "=none)")
	}
	return nil
}

// Apply writes the changes.
func (b *Backend) Apply(ctx context.Context, c intent.Changes) error {
	if c.Node != nil {
		if err := b.writeNode(c.Node); err != nil {
			return err
		}
	}
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	if b.ports.byID == nil { // the first call, and no Replace
		if err := b.reread(); err != nil {
			return err
		}
	}
	failed, err := b.ports.update(ctx, c.Upserts, c.Deletes, false)
	if err != nil {
		return err
	}
	return portErrors(failed)
}

// Replace makes the maps hold this state; at its first call the hooks follow, or,
// where nothing has been served yet, come first.
func (b *Backend) Replace(ctx context.Context, s intent.State) error {
	if err := b.writeNode(&s.Node); err != nil {
		return err
	}
	defer b.askCheck()
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	if err := b.reread(); err != nil {
		return err
	}
	if b.begins() {
		if err := b.attach(ctx); err != nil {
			return err
		}
	}
	failed, err := b.ports.replace(ctx, s.Ports)
	if err != nil {
		return err
	}
	if err := b.attach(ctx); err != nil {
		return err
	}
	return portErrors(failed)
}

// begins reports whether nothing has been served here by an earlier run. The
// programs are attached one by one; while they know no Service they leave all to
// whoever serves now, so that no question is translated at one interface whose
// answer comes by another that has no program yet. Filters (before 6.6) do not
// tell whose they are.
func (b *Backend) begins() bool {
	return !b.attached && len(b.ports.byID) == 0 && b.attacher.Mechanism() == "tcx" && !attach.Attached(b.cfg.BPFFS)
}

// reread looks at the maps where what is known of them is nothing, or was found
// wrong. Nobody else writes to them, but a whole state is asked for so that nothing
// need be believed; hence the checks. The caller holds portsMu.
func (b *Backend) reread() error {
	if b.known {
		return nil
	}
	fresh, err := readPorts(b.objects.maps)
	if err != nil {
		return err
	}
	fresh.inherit(b.ports)
	fresh.addrs = &b.serviceAddrs
	b.serviceAddrs.reset(fresh.owners)
	b.ports, b.known = fresh, true
	b.repaired.Add(b.doubt)
	b.doubt = dataplane.Repair{}
	return nil
}

func portErrors(failed map[intent.PortID]error) error {
	if len(failed) == 0 {
		return nil
	}
	return &dataplane.PortErrors{Errors: failed}
}

// attach puts the programs at their hooks and keeps them there.
func (b *Backend) attach(ctx context.Context) error {
	if b.attached {
		return nil
	}
	b.migrate(false)
	if err := b.attacher.Sync(ctx); err != nil {
		// Single interfaces have been reported; the others are served.
		b.cfg.Log.Error("Attach to interfaces", "err", err)
	}
	if err := attach.AttachCgroup(b.cfg.BPFFS, b.cfg.CgroupRoot, b.objects.socketPrograms()); err != nil {
		return fmt.Errorf("attach socket hooks: %w", err)
	}
	b.migrate(true)
	retireLayouts(b.cfg.BPFFS)
	b.attached = true
	run, stop := context.WithCancel(context.Background())
	b.stop = stop
	b.done.Go(func() {
		if err := b.attacher.Run(run); err != nil && run.Err() == nil {
			b.cfg.Log.Error("Follow network interfaces", "err", err)
		}
	})
	b.done.Go(func() { b.sweepLoop(run) })
	b.done.Go(func() { b.checkLoop(run) })
	b.cfg.Log.Info("eBPF dataplane attached", "mechanism", b.attacher.Mechanism(),
		"cgroup", b.cfg.CgroupRoot, "bpffs", b.cfg.BPFFS)
	return nil
}

// carry brings over what the programs of the earlier run have written lately.
func (b *Backend) migrate(switched bool) {
	if err := b.objects.migrator.migrate(b.objects.maps, switched); err != nil {
		b.cfg.Log.Warn("Flows of the last moments are forgotten", "reason", err)
	}
}

// Close lets go of maps, programs and links; what is pinned serves on.
func (b *Backend) Close() error {
	b.stopNAT()
	_ = b.ipsec.Close()
	if b.stop != nil {
		b.stop()
	}
	b.done.Wait()
	err := b.attacher.Close()
	b.objects.close()
	return err
}
