// Package attach puts programs at hooks and keeps them there: tcx (or clsact)
// hooks of the interfaces that lead outward and to pods, and cgroup hooks. It
// knows links, addresses and pins, and nothing of Services.
//
//	           ┌─────────── node ───────────┐
//	network ──>│ FromNetwork        ToPod   │──> pod
//	           │  (ingress of     (egress of│
//	           │   outward)        pod-side)│
//	network <──│ ToNetwork          FromPod │<── pod
//	           └────────────────────────────┘
//
// It also tells its owner which pods are behind which interface and which
// source address a packet is given that leaves by one.
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

	// Interfaces wait for the rest of their news as long as the last pass
	// took, within these bounds: soon when quiet, not all the time in a storm.
	minInterfaceWait = time.Millisecond
	maxInterfaceWait = 20 * time.Millisecond
	// Setting up a pod makes a dozen messages within some milliseconds.
	podWait = 15 * time.Millisecond
)

// Programs are the four programs, of type SchedCLS. They should end with
// TCX_NEXT (TC_ACT_UNSPEC) for packets they have no say in. A nil program
// leaves its hook empty.
type Programs struct {
	FromNetwork *ebpf.Program // ingress of outward interfaces
	ToNetwork   *ebpf.Program // egress of outward interfaces
	FromPod     *ebpf.Program // ingress of pod-side interfaces
	ToPod       *ebpf.Program // egress of pod-side interfaces
}

// Config is what an Attacher needs. Callbacks are called by one goroutine at a
// time and must not call back into the Attacher.
type Config struct {
	// PinDir is the instance's own directory in bpffs. Links are pinned in
	// PinDir/links.
	PinDir   string
	Programs Programs
	// ForceClsact uses clsact even where there is tcx.
	ForceClsact bool

	// OnUplinks, if set, gets all outward interfaces whenever one changed,
	// before programs are attached to a new one.
	OnUplinks func(map[int]Uplink)
	// OnPods, if set, gets the pods of the node: all at the first Sync, then
	// the differences.
	OnPods func(PodChanges)
	// Facts, if set, returns what the cluster says about an address that a pod
	// claims. NoteFacts has it called again.
	Facts func(netip.Addr) Fact
	// Owners are the pods of an earlier run. An interface that had an address then
	// keeps it while the interface is there and claims the address.
	Owners map[netip.Addr]Pod
	// OnRefused, if set, gets each claim that has been refused for ReportAfter, once.
	OnRefused func(Refusal)
	// ReportAfter is how long a claim is refused before OnRefused gets it; 0: 5 s.
	ReportAfter time.Duration
	// OnError, if set, hears of each interface that could not be served, when
	// its error is a new one, and with nil when it is served again. Errors
	// that concern no interface have the name "".
	OnError func(iface string, err error)
}

// Validate reports what is missing.
func (c *Config) Validate() error {
	if c.PinDir == "" {
		return errors.New("attach: PinDir is empty: give a directory in bpffs")
	}
	return nil
}

// Status is how one interface is served.
type Status struct {
	Interface
	// Attached names the hooks that have a program: "ingress", "egress".
	Attached []string
	Err      error
}

// hooks is the way programs are attached: tcx or clsact.
type hooks interface {
	load() error
	ensure(h hook, p program, verify bool) error
	drop(hook) error
	hooks() []hook
	close()
}

// Attacher attaches programs to the interfaces of one network namespace.
type Attacher struct {
	cfg      Config
	ns       netns.NsHandle
	h        *netlink.Handle
	news     *news
	programs map[Role]map[direction]program

	mu      sync.Mutex // for all below, and for the callbacks
	hooks   hooks
	tcx     bool
	loaded  bool
	pods    *podTable
	routes  routes
	decided map[int]bool // interfaces whose role no route changes
	uplinks map[int]Uplink
	status  map[int]Status
	failed  map[string]string // errors told, by interface name
	pending dirty             // pods' news, until their turn comes
	took    time.Duration     // of the last pass over interfaces

	podsTold time.Time
}

// New prepares an Attacher for the calling thread's network namespace, in which
// it then works whatever thread it is called from. It attaches nothing yet,
// but listens: what changes between Sync and Run is not missed.
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
	// The sockets are opened in this thread's namespace, without a setns(2), which
	// would take CAP_SYS_ADMIN.
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
	if a.news, err = newNews(); err != nil {
		return err
	}
	a.tcx = !a.cfg.ForceClsact && kernel.HaveTCX()
	a.hooks = a.newHooks(a.tcx)
	return nil
}

func (a *Attacher) newHooks(tcx bool) hooks {
	if tcx {
		return &tcxHooks{dir: a.linksDir(), links: make(map[hook]*tcxLink)}
	}
	return &clsactHooks{h: a.h, progs: make(map[hook]ebpf.ProgramID)}
}

func (a *Attacher) linksDir() string { return linksDir(a.cfg.PinDir) }

func linksDir(pinDir string) string { return filepath.Join(pinDir, "links") }

func programTable(p Programs) (map[Role]map[direction]program, error) {
	res := map[Role]map[direction]program{Outward: {}, PodSide: {}}
	for _, e := range []struct {
		role Role
		dir  direction
		prog *ebpf.Program
	}{
		{Outward, ingress, p.FromNetwork}, {Outward, egress, p.ToNetwork},
		{PodSide, ingress, p.FromPod}, {PodSide, egress, p.ToPod},
	} {
		if e.prog == nil {
			continue
		}
		info, err := e.prog.Info()
		if err != nil {
			return nil, fmt.Errorf("read program: %w", err)
		}
		id, ok := info.ID()
		if !ok {
			return nil, errors.New("read program: it has no ID (needs Linux 4.13)")
		}
		res[e.role][e.dir] = program{e.prog, id}
	}
	return res, nil
}

// Close lets go of sockets and handles. Programs stay attached.
func (a *Attacher) Close() error {
	if a.news != nil {
		a.news.close()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hooks != nil {
		a.hooks.close()
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

// Status gives the interfaces with a role, by index.
func (a *Attacher) Status() []Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.status), func(x, y Status) int { return x.Ifindex - y.Ifindex })
}

// Mechanism is "tcx" or "clsact".
func (a *Attacher) Mechanism() string {
	if a.tcx {
		return "tcx"
	}
	return "clsact"
}

// Pods gives the pods of the node as last told.
func (a *Attacher) Pods() map[netip.Addr]Pod {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.pods.told)
}

// Refused returns the claims that are refused now, sorted by interface and address.
func (a *Attacher) Refused() []Refusal {
	a.mu.Lock()
	defer a.mu.Unlock()
	var res []Refusal
	for _, e := range a.pods.sortedRefusals() {
		res = append(res, e.Refusal)
	}
	return res
}

// NoteFacts says that Facts may return something else now. It does not wait, and Run
// decides the claims again. It may be called from a callback.
func (a *Attacher) NoteFacts() { a.news.noteFacts() }

// Uplinks gives the outward interfaces as last told.
func (a *Attacher) Uplinks() map[int]Uplink {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.uplinks)
}

// Detach removes all that an Attacher with this PinDir attached in this
// namespace, also in an earlier run. Twice is no error. Run must have ended.
func (a *Attacher) Detach() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return kernel.Do(a.ns, func() error {
		a.hooks.close()
		errs := []error{dropAll(a.newHooks(true)), dropAll(a.newHooks(false)), removeDir(a.linksDir())}
		a.hooks = a.newHooks(a.tcx)
		a.loaded = false
		clear(a.status)
		return errors.Join(errs...)
	})
}

// DetachFilters removes the clsact filters of the calling thread's network
// namespace. They stay without a pin, so they can be there when the pins are
// not. Twice is no error.
func DetachFilters() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("look for clsact filters: %w", err)
	}
	defer h.Close()
	_ = h.SetSocketTimeout(requestTimeout)
	return dropAll(&clsactHooks{h: h, progs: make(map[hook]ebpf.ProgramID)})
}

// Unpin removes the pinned tcx links of PINDIR, whatever namespace they are in,
// and with them the programs from their hooks. Twice is no error.
func Unpin(pinDir string) error {
	var errs []error
	eachPinnedLink(pinDir, func(l link.Link) {
		// A handle that somebody else holds must not keep the program there,
		// and without one the kernel takes its time.
		if err := l.Detach(); err != nil && !errors.Is(err, link.ErrNotSupported) {
			errs = append(errs, fmt.Errorf("detach pinned link: %w", err))
		}
	})
	if err := os.RemoveAll(linksDir(pinDir)); err != nil {
		errs = append(errs, fmt.Errorf("remove pinned links: %w", err))
	}
	return errors.Join(errs...)
}

// Attached reports whether a link pinned in PINDIR has an interface, in
// whatever namespace.
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

// dropAll removes what is found of an earlier run.
func dropAll(hk hooks) error {
	errs := []error{hk.load()}
	for _, h := range hk.hooks() {
		// A handle that somebody else holds must not keep the program there.
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

// Run follows the kernel's news until ctx ends, and then leaves everything
// attached. Every 30 seconds, and when news were lost, it looks at everything.
func (a *Attacher) Run(ctx context.Context) error {
	resync := time.NewTimer(resyncInterval)
	defer resync.Stop()
	var interfaces, pods <-chan time.Time
	reports := time.NewTimer(0)
	defer reports.Stop()
	for {
		again := false
		select {
		case <-ctx.Done():
			return nil
		case <-a.news.wake:
			if interfaces == nil {
				interfaces = time.After(a.interfaceWait())
			}
			if pods == nil {
				pods = time.After(podWait)
			}
			continue
		case <-interfaces:
			interfaces = nil
			again = a.pass(false)
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
