// Package node writes the maps about the node itself: settings, addresses, pods and ranges.
package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
)

// Writer writes the maps about the node itself: settings, source ports, addresses, pods,
// external devices, and what IPsec policies select. It is safe for concurrent use.
type Writer struct {
	cfg           *objects.Config
	objects       *objects.Objects
	factsChanged  func() // called when Fact may answer differently; nil: not needed
	isServiceAddr func(netip.Addr) bool
	sourcesLost   func(map[netip.Addr]bool) error // see OnSourcesLost
	watchFlowsTo  func([]netip.Prefix, func())    // see OnEgressKept
	facts         atomic.Pointer[podFacts]        // nil before the first node
	ipsec         *kernel.XfrmWatch               // watches IPsec policies
	stopNAT       func()                          // stops Config.WatchNAT
	unhook        chan struct{}                   // the pods without socket hooks have changed

	mu            sync.Mutex // for the fields below: interfaces change on their own
	node          *intent.Node
	written       *objects.TCSettings // nil before the first node
	uplinks       map[int]attach.Uplink
	pods          map[netip.Addr]attach.Pod
	traversing    map[netip.Addr]traversal
	unwritten     map[netip.Addr]objects.TCPod // entries of pods that did not fit
	untracking    bool                         // untracked_ports has entries
	snatPorts     []uint16
	clusterRanges map[objects.TCRangeKey]bool
	xfrm          []kernel.XfrmPolicy // IPsec policies of this network namespace
	routesLeftOut bool                // route_mtus has no room for all routes
	askConntrack  bool                // netfilter may translate destinations: see Config.WatchNAT
	draining      bool                // an earlier run drained, and no Services are written yet: see EndDraining
	egressKept    bool                // SETTING_EGRESS_KEPT
	events        objects.TCSettingsFlags

	egressAddresses []objects.TCAddr    // of egress_addresses; nil: not written yet
	sources         map[netip.Addr]bool // that flows of egress may have
}

// New returns a Writer that has not read the maps yet. It calls factsChanged, if not nil, when Fact may
// answer differently.
func New(cfg *objects.Config, o *objects.Objects, isServiceAddr func(netip.Addr) bool, factsChanged func()) *Writer {
	return &Writer{
		cfg: cfg, objects: o, isServiceAddr: isServiceAddr, factsChanged: factsChanged, stopNAT: func() {}, unhook: make(chan struct{}, 1),
		pods: map[netip.Addr]attach.Pod{}, traversing: map[netip.Addr]traversal{},
		sources: map[netip.Addr]bool{}, events: cfg.EventFlags(),
	}
}

// OnSourcesLost has f called with the source addresses of egress that the node no longer has.
func (w *Writer) OnSourcesLost(f func(lost map[netip.Addr]bool) error) { w.sourcesLost = f }

// OnEgressKept has watch called with the destinations that egress leaves to netfilter, when they have grown. watch
// calls none when there is no flow of egress to them.
func (w *Writer) OnEgressKept(watch func(to []netip.Prefix, none func())) { w.watchFlowsTo = watch }

// Read reads what an earlier run has written. untracking says that untracked_ports has entries.
func (w *Writer) Read(untracking bool) (err error) {
	if w.pods, err = readPods(w.m(objects.TCMapPods)); err != nil {
		return err
	}
	var s objects.TCSettings
	if err = w.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	w.draining = s.Flags&uint32(objects.TCSettingsFlagsSETTING_DRAINS) != 0
	w.egressKept = s.Flags&uint32(objects.TCSettingsFlagsSETTING_EGRESS_KEPT) != 0
	w.untracking = untracking
	if w.clusterRanges, err = objects.ReadClusterRanges(w.m(objects.TCMapClusterRanges)); err != nil {
		return err
	}
	return w.readSources()
}

// Write updates the maps about the node itself: first what protects, of which an error
// holds up nothing else.
func (w *Writer) Write(n *intent.Node) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.node
	w.node = n
	w.setFacts(n)
	errs := []error{w.keepEgressFlows(before, n), w.addClusterRanges(n), w.writeTraversing(before, n)}
	if before == nil || !slices.Equal(before.UnhookedPods, n.UnhookedPods) {
		w.askUnhook()
		_, err := w.writeUnhooked()
		errs = append(errs, err)
	}
	want := map[objects.TCAddrKey]uint32{}
	for _, a := range n.Addrs {
		want[objects.AddrKey(a)] = 0
	}
	for _, a := range n.NodePortAddrs {
		want[objects.AddrKey(a)] = uint32(objects.TCNodeAddrFlagsNODE_ADDR_NODEPORT)
	}
	if err := objects.ReplaceMap(w.m(objects.TCMapNodeAddrs), want); err != nil {
		errs = append(errs, fmt.Errorf("write node addresses: %w", err))
	}
	errs = append(errs, w.writeEgressAddresses(n), w.writeSettings(n), w.removeClusterRanges(n))
	return errors.Join(append(errs, w.loseSources(n))...)
}

// EndDraining ends the draining of an earlier run: the Services are written. Until then the programs
// would refuse the datagrams of sockets that they have translated, since no Service has the address.
func (w *Writer) EndDraining() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.draining || w.node == nil {
		return nil
	}
	w.draining = false
	return w.writeSettings(w.node)
}

// Watch follows IPsec policies and netfilter's rules until Close.
func (w *Writer) Watch() (err error) {
	w.ipsec, err = kernel.WatchXfrm(w.OnXfrm, func(err error) { w.cfg.Log.Error("Read IPsec policies", "err", err) })
	if err == nil {
		w.followNAT()
	}
	return err
}

// Close stops what Watch has started.
func (w *Writer) Close() {
	w.stopNAT()
	_ = w.ipsec.Close()
}

// Run keeps the settings and the cgroups of pods current until ctx is done.
func (w *Writer) Run(ctx context.Context) {
	var agentSeen sync.WaitGroup
	agentSeen.Go(func() { w.agentSeenLoop(ctx) })
	w.unhookLoop(ctx)
	agentSeen.Wait()
}

// Current returns the node that was written last, nil if there was none.
func (w *Writer) Current() *intent.Node {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.node
}

// Pods returns the pods of this node with their devices.
func (w *Writer) Pods() map[netip.Addr]attach.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.pods)
}

// m returns a map by its name in bpf/maps.h.
func (w *Writer) m(name string) *ebpf.Map { return w.objects.Maps[name] }
