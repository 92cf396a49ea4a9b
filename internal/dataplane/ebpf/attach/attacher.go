// Package attach attaches programs to hooks and keeps them attached: tcx (or clsact)
// hooks of the external devices and of the pod-side devices, and cgroup hooks. It
// handles links, addresses and pins, and knows nothing about Services.
//
//	           ┌─────────── node ───────────┐
//	network ──>│ FromNetwork        ToPod   │──> pod
//	           │  (ingress of     (egress of│
//	           │   external)       pod-side)│
//	network <──│ ToNetwork          FromPod │<── pod
//	           └────────────────────────────┘
//
// It also reports the pod behind each interface, and the source address of packets that
// leave through each external device.
package attach

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

const (
	requestTimeout = 5 * time.Second
	resyncInterval = 30 * time.Second
	retryInterval  = time.Second

	// A pass over interfaces waits for further events as long as the last pass took,
	// within these bounds: briefly in quiet times, longer in a storm of events.
	minInterfaceWait = time.Millisecond
	maxInterfaceWait = 20 * time.Millisecond
	// The setup of a pod causes a dozen messages within some milliseconds.
	podWait = 15 * time.Millisecond
)

// Programs are the programs, of type SchedCLS. They should return TCX_NEXT
// (TC_ACT_UNSPEC) for packets of others. A nil program leaves its hook empty.
type Programs struct {
	FromNetwork *ebpf.Program // ingress of external devices
	ToNetwork   *ebpf.Program // egress of external devices
	FromPod     *ebpf.Program // ingress of pod-side devices
	ToPod       *ebpf.Program // egress of pod-side devices
	// LoadL3 loads the first two for external devices without a link-layer header (Interface.L3),
	// which few nodes have. It is called when there is one, until it succeeds; nil: none is served.
	LoadL3 func() (fromNetwork, toNetwork *ebpf.Program, err error)
	// TailCalls, if set, is the array of the programs that these call.
	TailCalls *ebpf.Map
}

// Config configures an Attacher. One goroutine at a time calls the callbacks. They must
// not call back into the Attacher.
type Config struct {
	// PinDir is the instance's own directory in bpffs. Links are pinned in
	// PinDir/links.
	PinDir   string
	Programs Programs
	// ForceClsact uses clsact even if the kernel has tcx.
	ForceClsact bool
	// XDP, if set, has a program for external devices. Without it, that of an earlier run is
	// detached.
	XDP *XDP

	// OnUplinks, if set, receives all external devices after each change, before
	// programs are attached to a new one.
	OnUplinks func(map[int]Uplink)
	// OnRouteMTUs, if set, receives the MTUs of all routes after each change, before programs are
	// attached. There are at most MaxRouteMTUs.
	OnRouteMTUs  func(RouteMTUs)
	MaxRouteMTUs int
	// OnPods, if set, receives the pods of the node: all at the first Sync, then the
	// changes.
	OnPods func(PodChanges)
	// Facts, if set, returns the cluster's data about an address that a pod announces.
	// NoteFacts requests another call.
	Facts func(netip.Addr) Fact
	// Owners are the pods of an earlier run. An interface that had an address then
	// keeps it as long as the interface exists and announces the address.
	Owners map[netip.Addr]Pod
	// OnRefused, if set, receives once each announcement that has been refused for
	// ReportAfter.
	OnRefused func(Refusal)
	// ReportAfter is the time until OnRefused receives a refused announcement; 0: 5 s.
	ReportAfter time.Duration
	// OnError, if set, receives each new error of an interface, and nil when the
	// interface is served again. Errors of no interface have the name "".
	OnError func(iface string, err error)
}

// Validate checks that all required fields are set.
func (c *Config) Validate() error {
	if c.PinDir == "" {
		return errors.New("attach: PinDir is empty: give a directory in bpffs")
	}
	return nil
}

// Status describes how one interface is served.
type Status struct {
	Interface
	// Attached names the hooks that have a program: "ingress", "egress".
	Attached []string
	// XDP is the mode of the XDP program, or why there is none; "" without Config.XDP.
	XDP string
	Err error
}

// hooks is a mechanism to attach programs: tcx or clsact.
type hooks interface {
	load() error
	ensure(h hook, p program, verify bool) error
	drop(hook) error
	// attached returns the hooks with their programs.
	attached() map[hook]ebpf.ProgramID
	close()
}

// Attacher attaches programs to the interfaces of one network namespace.
type Attacher struct {
	cfg      Config
	ns       netns.NsHandle
	h        *netlink.Handle
	events   *events
	programs map[kind]map[direction]program
	calls    *tailCalls

	mu      sync.Mutex // for the fields below, and for the callbacks
	hooks   hooks
	xdp     *xdpHooks // nil without Config.XDP
	tcx     bool
	loaded  bool
	pods    *podTable
	routes  routes
	devices []device     // of the last look
	decided map[int]bool // interfaces whose role no route changes
	uplinks map[int]Uplink
	status  map[int]Status
	failed  map[string]string // reported errors, by interface name
	pending dirty             // events of pods that wait for the next pass
	took    time.Duration     // by the last pass over interfaces

	routeMTUs  map[RouteKey]uint32 // as last reported
	routesTook time.Duration       // to read them

	podsReported time.Time
}

// New prepares an Attacher for the calling thread's network namespace. It works in that
// namespace on any thread. New attaches nothing, but subscribes to events, so that no
// change between Sync and Run is missed.
func New(cfg Config) (*Attacher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &Attacher{cfg: cfg, status: make(map[int]Status), failed: make(map[string]string)}
	if err := a.open(); err != nil {
		a.Close()
		return nil, fmt.Errorf("follow network interfaces: %w", err)
	}
	return a, nil
}

func (a *Attacher) open() error {
	var err error
	a.ns = netns.None()
	if a.programs, err = programTable(a.cfg.Programs); err != nil {
		return err
	}
	if a.calls, err = openTailCalls(a.cfg.PinDir, a.cfg.Programs.TailCalls); err != nil {
		return err
	}
	// The sockets belong to this thread's namespace without setns(2), which would need
	// CAP_SYS_ADMIN.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if a.ns, err = netns.Get(); err != nil {
		return err
	}
	if a.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	_ = a.h.SetSocketTimeout(requestTimeout)
	if a.pods, err = newPodTable(a.h, a.cfg.Facts, a.cfg.Owners); err != nil {
		return err
	}
	if a.events, err = newEvents(); err != nil {
		return err
	}
	a.tcx = !a.cfg.ForceClsact && kernel.HaveTCX()
	a.hooks = a.newHooks(a.tcx)
	if a.cfg.XDP != nil {
		a.xdp, err = openXDP(a.cfg.PinDir, *a.cfg.XDP)
	}
	return err
}

func (a *Attacher) newHooks(tcx bool) hooks {
	if tcx {
		return &tcxHooks{dir: a.linksDir(), links: make(map[hook]*tcxLink)}
	}
	return &clsactHooks{h: a.h, progs: make(map[hook]ebpf.ProgramID)}
}

func (a *Attacher) linksDir() string { return linksDir(a.cfg.PinDir) }

func linksDir(pinDir string) string { return filepath.Join(pinDir, "links") }

// kind is a kind of interface: all of a kind have the same programs.
type kind struct {
	role Role
	l3   bool
}

// networkL3 are the devices of Programs.LoadL3.
var networkL3 = kind{External, true}

func programTable(p Programs) (res map[kind]map[direction]program, err error) {
	res = map[kind]map[direction]program{}
	if res[kind{role: External}], err = directions(p.FromNetwork, p.ToNetwork); err != nil {
		return nil, err
	}
	res[kind{role: PodSide}], err = directions(p.FromPod, p.ToPod)
	return res, err
}

func directions(in, out *ebpf.Program) (map[direction]program, error) {
	res := map[direction]program{}
	for dir, prog := range map[direction]*ebpf.Program{ingress: in, egress: out} {
		if prog == nil {
			continue
		}
		info, err := prog.Info()
		if err != nil {
			return nil, fmt.Errorf("read program: %w", err)
		}
		id, ok := info.ID()
		if !ok {
			return nil, errors.New("read program: it has no ID (needs Linux 4.13)")
		}
		res[dir] = program{prog, id}
	}
	return res, nil
}

// programsOf returns the programs for an interface.
func (a *Attacher) programsOf(i Interface) (map[direction]program, error) {
	k := kind{i.Role, i.L3}
	if k == networkL3 && a.programs[k] == nil && a.cfg.Programs.LoadL3 != nil {
		in, out, err := a.cfg.Programs.LoadL3()
		if err != nil {
			return nil, err
		}
		if a.programs[k], err = directions(in, out); err != nil {
			return nil, err
		}
	}
	programs, served := a.programs[k]
	if !served {
		return nil, errors.New("pods behind a device without an Ethernet header are served by socket hooks alone")
	}
	return programs, nil
}

// Close closes sockets and handles. Programs stay attached.
func (a *Attacher) Close() error {
	if a.events != nil {
		a.events.close()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hooks != nil {
		a.hooks.close()
	}
	if a.xdp != nil {
		a.xdp.close()
	}
	if a.pods != nil {
		a.pods.close()
	}
	if a.h != nil {
		a.h.Close()
	}
	if a.ns.IsOpen() {
		return a.ns.Close()
	}
	return nil
}

// Status returns the interfaces with a role, by index.
func (a *Attacher) Status() []Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := slices.SortedFunc(maps.Values(a.status), func(x, y Status) int { return x.Ifindex - y.Ifindex })
	for i := range list {
		if a.xdp != nil {
			list[i].XDP = a.xdp.decided[list[i].Ifindex]
		}
	}
	return list
}

// Mechanism returns "tcx" or "clsact".
func (a *Attacher) Mechanism() string {
	if a.tcx {
		return "tcx"
	}
	return "clsact"
}

// Refused returns the currently refused announcements, sorted by interface and address.
func (a *Attacher) Refused() []Refusal {
	a.mu.Lock()
	defer a.mu.Unlock()
	var res []Refusal
	for _, e := range a.pods.sortedRefusals() {
		res = append(res, e.Refusal)
	}
	return res
}

// NoteFacts says that Facts may return other data now. It does not wait: Run decides
// about the announcements again. It may be called from a callback.
func (a *Attacher) NoteFacts() { a.events.noteFacts() }

// Detach removes everything that an Attacher with this PinDir attached in this
// namespace, also in an earlier run. A second call is no error. Run must have returned.
func (a *Attacher) Detach() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return kernel.Do(a.ns, func() error {
		a.hooks.close()
		errs := []error{UnpinXDP(a.cfg.PinDir), dropAll(a.newHooks(true)), dropAll(a.newHooks(false)), removeDir(a.linksDir()),
			os.RemoveAll(tailCallsDir(a.cfg.PinDir))}
		a.hooks = a.newHooks(a.tcx)
		a.loaded = false
		clear(a.status)
		return errors.Join(errs...)
	})
}

// DetachFilters removes the clsact filters of the calling thread's network namespace.
// They need no pins, so they may exist without them. A second call is no error.
func DetachFilters() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("look for clsact filters: %w", err)
	}
	defer h.Close()
	_ = h.SetSocketTimeout(requestTimeout)
	return dropAll(&clsactHooks{h: h, progs: make(map[hook]ebpf.ProgramID)})
}

// Unpin removes the pinned tcx and XDP links of PINDIR, in any namespace, and so detaches
// their programs. A second call is no error.
func Unpin(pinDir string) error {
	errs := []error{UnpinXDP(pinDir)}
	eachPinnedLink(pinDir, func(l link.Link) {
		// A handle of another program must not keep the program attached. Without one,
		// the kernel detaches with a delay.
		if err := l.Detach(); err != nil && !errors.Is(err, link.ErrNotSupported) {
			errs = append(errs, fmt.Errorf("detach pinned link: %w", err))
		}
	})
	if err := errors.Join(os.RemoveAll(linksDir(pinDir)), os.RemoveAll(tailCallsDir(pinDir))); err != nil {
		errs = append(errs, fmt.Errorf("remove pinned links: %w", err))
	}
	return errors.Join(errs...)
}

// Attached reports whether a link pinned in PINDIR has an interface, in any namespace.
func Attached(pinDir string) (attached bool) {
	eachPinnedLink(pinDir, func(l link.Link) {
		info, err := l.Info()
		attached = attached || err == nil && info.TCX() != nil && info.TCX().Ifindex != 0
	})
	return attached
}

func eachPinnedLink(pinDir string, do func(link.Link)) {
	pins, _ := filepath.Glob(filepath.Join(linksDir(pinDir), "*"))
	for _, path := range pins {
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			do(l)
			l.Close()
		}
	}
}

// dropAll removes the hooks of an earlier run.
func dropAll(hk hooks) error {
	errs := []error{hk.load()}
	for h := range hk.attached() {
		// A handle of another program must not keep the program attached.
		if t, ok := hk.(*tcxHooks); ok {
			if err := t.links[h].Detach(); err != nil && !errors.Is(err, link.ErrNotSupported) {
				errs = append(errs, err)
			}
		}
		if err := hk.drop(h); err != nil {
			errs = append(errs, fmt.Errorf("detach from interface %d: %w", h.ifindex, err))
		}
	}
	hk.close()
	return errors.Join(errs...)
}

// Run follows the kernel's events until ctx ends, and leaves everything attached. Every
// 30 seconds, and after lost events, it checks everything.
func (a *Attacher) Run(ctx context.Context) error {
	resync := time.NewTimer(resyncInterval)
	defer resync.Stop()
	var interfaces, pods, mtus <-chan time.Time
	reports := time.NewTimer(0)
	defer reports.Stop()
	for {
		again := false
		select {
		case <-ctx.Done():
			return nil
		case <-a.events.wake:
			if interfaces == nil {
				interfaces = time.After(a.interfaceWait())
			}
			if pods == nil {
				pods = time.After(podWait)
			}
			if mtus == nil {
				mtus = time.After(a.mtuWait())
			}
			continue
		case <-interfaces:
			interfaces = nil
			again = a.pass(false)
		case <-mtus:
			mtus = nil
			a.mtuPass()
		case <-pods:
			pods = nil
			a.podPass()
			reports.Reset(0)
		case <-reports.C:
			if next := a.reportRefusals(); next > 0 {
				reports.Reset(next)
			}
		case <-resync.C:
			again = a.pass(true)
			a.podPass()
			reports.Reset(0)
			resync.Reset(resyncInterval)
		}
		if again {
			resync.Reset(retryInterval)
		}
	}
}
