package ebpf

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
)

// nodeWriter writes the maps about the node itself: settings, source ports, addresses, pods,
// external devices, and what IPsec policies select. It is safe for concurrent use.
type nodeWriter struct {
	cfg           *objects.Config
	objects       *objects.Objects
	factsChanged  func() // called when fact may answer differently; nil: not needed
	isServiceAddr func(netip.Addr) bool
	facts         atomic.Pointer[podFacts] // nil before the first node
	ipsec         *kernel.XfrmWatch        // watches IPsec policies
	stopNAT       func()                   // stops Config.WatchNAT
	unhook        chan struct{}            // the pods without socket hooks have changed

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
	draining      bool                // an earlier run drained, and no Services are written yet: see serves
}

func newNodeWriter(cfg *objects.Config, o *objects.Objects, isServiceAddr func(netip.Addr) bool) *nodeWriter {
	return &nodeWriter{
		cfg: cfg, objects: o, isServiceAddr: isServiceAddr, stopNAT: func() {}, unhook: make(chan struct{}, 1),
		pods: map[netip.Addr]attach.Pod{}, traversing: map[netip.Addr]traversal{},
	}
}

// read reads what an earlier run has written. untracking says that untracked_ports has entries.
func (w *nodeWriter) read(untracking bool) (err error) {
	if w.pods, err = readPods(w.m(objects.TCMapPods)); err != nil {
		return err
	}
	var s objects.TCSettings
	if err = w.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	w.draining = s.Flags&uint32(objects.TCSettingsFlagsSETTING_DRAINS) != 0
	w.clusterRanges, err = objects.ReadClusterRanges(w.m(objects.TCMapClusterRanges))
	w.untracking = untracking
	return err
}

// serves ends the draining of an earlier run: the Services are written. Until then the programs
// would refuse the datagrams of sockets that they have translated, since no Service has the address.
func (w *nodeWriter) serves() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.draining || w.node == nil {
		return nil
	}
	w.draining = false
	return w.writeSettings(w.node)
}

// watch follows IPsec policies and netfilter's rules until close.
func (w *nodeWriter) watch() (err error) {
	w.ipsec, err = kernel.WatchXfrm(w.onXfrm, func(err error) { w.cfg.Log.Error("Read IPsec policies", "err", err) })
	if err == nil {
		w.followNAT()
	}
	return err
}

func (w *nodeWriter) close() {
	w.stopNAT()
	_ = w.ipsec.Close()
}

// run keeps the settings and the cgroups of pods current until ctx is done.
func (w *nodeWriter) run(ctx context.Context) {
	var beats sync.WaitGroup
	beats.Go(func() { w.beatLoop(ctx) })
	w.unhookLoop(ctx)
	beats.Wait()
}

// current returns the node that was written last, nil if there was none.
func (w *nodeWriter) current() *intent.Node {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.node
}

// m returns a map by its name in bpf/maps.h.
func (w *nodeWriter) m(name string) *ebpf.Map { return w.objects.Maps[name] }
