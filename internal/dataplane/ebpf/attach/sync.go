package attach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/node/kernel"
)

// Sync checks everything once: it reports uplinks and pods, attaches missing programs,
// replaces programs of an earlier run, and removes hooks without an interface. The
// error joins those of single interfaces; the others are served.
func (a *Attacher) Sync(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return kernel.Do(a.ns, func() error {
		d := a.events.flush()
		d.all = true
		return a.syncAll(d)
	})
}

// syncAll reports pods before it attaches the programs that need them.
func (a *Attacher) syncAll(d dirty) error {
	seen, err := a.look(d)
	if err != nil {
		return err
	}
	a.pending = dirty{all: true}
	a.reportPods()
	return a.apply(seen, d)
}

// pass updates hooks and uplinks, and reports whether it should run again soon.
func (a *Attacher) pass(all bool) (again bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	begin := time.Now()
	d := a.events.flush()
	d.all = d.all || all
	a.pending.merge(d)
	if !d.links && !d.routes && !d.all {
		return false
	}
	err := kernel.Do(a.ns, func() error {
		seen, err := a.look(d)
		if err != nil {
			a.report("", err)
			return err
		}
		a.report("", nil)
		return a.apply(seen, d)
	})
	a.took = time.Since(begin)
	return err != nil
}

// podPass reports the changes of pods since the last pass.
func (a *Attacher) podPass() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reportPods()
}

// reportRefusals reports announcements to OnRefused, and returns when to call it again; 0
// means after the next change.
func (a *Attacher) reportRefusals() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cfg.OnRefused == nil {
		return 0
	}
	return a.pods.report(time.Now(), cmp.Or(a.cfg.ReportAfter, defaultReportAfter), a.cfg.OnRefused)
}

func (a *Attacher) interfaceWait() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return min(max(a.took, minInterfaceWait), maxInterfaceWait)
}

// merge adds the marks of other.
func (d *dirty) merge(other dirty) {
	d.links = d.links || other.links
	d.neighs = d.neighs || other.neighs
	d.all = d.all || other.all
	d.facts = d.facts || other.facts
	d.rules = d.rules || other.rules
	if d.paths == nil {
		d.paths = other.paths
	} else {
		maps.Copy(d.paths, other.paths)
	}
	if d.nsids == nil {
		d.nsids = other.nsids
	} else {
		maps.Copy(d.nsids, other.nsids)
	}
}

// look reads links, addresses and, if they changed, routes. It reports uplinks and
// updates the ports of pods.
func (a *Attacher) look(d dirty) ([]Interface, error) {
	links, err := listLinks(a.h)
	if err != nil {
		return nil, err
	}
	addrs, err := listAddrs(a.h)
	if err != nil {
		return nil, err
	}
	devices, err := a.listDevices(links, addrs, d.routes || d.all)
	if err != nil {
		return nil, err
	}
	a.devices = devices
	ifaces := classify(devices)
	a.pods.setPorts(devices, ifaces)
	a.pods.paths.follow(devices, addrs)

	ups := uplinks(ifaces, addrs, a.routes)
	if a.uplinks == nil || !maps.Equal(ups, a.uplinks) {
		a.uplinks = ups
		if a.cfg.OnUplinks != nil {
			a.cfg.OnUplinks(maps.Clone(ups))
		}
	}
	return ifaces, nil
}

// listDevices reads routes again only after relevant changes: a node with BGP may have
// a million.
func (a *Attacher) listDevices(links []netlink.Link, addrs map[int][]netlink.Addr, reread bool) ([]device, error) {
	devices := listDevices(links, addrs, a.routes)
	decided := make(map[int]bool)
	for i := range devices {
		if !devices[i].ambiguous() {
			decided[devices[i].index] = true
		} else if a.decided[devices[i].index] {
			reread = true // The events of its routes were ignored until now.
		}
	}
	a.decided = decided
	a.events.ignoreRoutes(decided)
	if !reread && a.routes.wide != nil {
		return devices, nil
	}
	if err := a.readRoutes(); err != nil {
		return nil, err
	}
	return listDevices(links, addrs, a.routes), nil
}

// reportPods reads pods with events and calls OnPods with the differences.
func (a *Attacher) reportPods() {
	a.podsReported = time.Now()
	d := a.pending
	a.pending = dirty{}
	routing := d.rules || len(d.paths) > 0
	if !d.all && !d.links && !d.neighs && len(d.nsids) == 0 && !d.facts && !routing {
		return
	}
	a.pods.paths.forget(d.paths, d.all || d.rules)
	reread := a.pods.read(d.nsids, d.all) || d.all || d.links || d.neighs
	if !reread && !d.facts && !routing {
		return // Events of namespaces without pods of this node.
	}
	a.pods.collect(reread)
	// Before the query: a change of a route in between causes an event.
	a.events.watchRoutes(a.pods.announcedAddrs())
	c := a.pods.changes()
	a.events.watchNeighbors(a.pods.neighborWatch())
	if a.cfg.OnPods != nil && (c.Full || len(c.Upserts)+len(c.Deletes) > 0) {
		a.cfg.OnPods(PodChanges{Full: c.Full, Upserts: maps.Clone(c.Upserts), Deletes: append([]netip.Addr(nil), c.Deletes...)})
	}
}

// apply attaches to interfaces and detaches from them.
func (a *Attacher) apply(ifaces []Interface, d dirty) error {
	if !a.loaded {
		if err := a.load(); err != nil {
			return err
		}
		a.loaded = true
		d.all = true
	}
	if d.all {
		if err := a.calls.pin(); err != nil {
			return err
		}
	}
	wanted := make(map[hook]bool)
	status := make(map[int]Status)
	var errs []error
	for _, i := range externalFirst(ifaces) {
		a.reportPodsMeanwhile()
		st := a.attachTo(i, wanted, d.all || d.gone[i.Ifindex])
		if st.Err != nil {
			errs = append(errs, fmt.Errorf("interface %s: %w", i.Name, st.Err))
		}
		a.report(i.Name, st.Err)
		status[i.Ifindex] = st
	}
	for h := range a.hooks.attached() {
		if wanted[h] {
			continue
		}
		if err := a.hooks.drop(h); err != nil && !vanished(err) {
			errs = append(errs, fmt.Errorf("detach from interface %d: %w", h.ifindex, err))
		}
	}
	if a.calls.left && a.haveOwnPrograms() {
		errs = append(errs, a.calls.dropOthers())
	}
	a.status = status
	a.forget(ifaces)
	errs = append(errs, a.applyXDP(ifaces))
	return errors.Join(errs...)
}

// haveOwnPrograms reports whether all hooks have programs of this agent.
func (a *Attacher) haveOwnPrograms() bool {
	own := map[ebpf.ProgramID]bool{}
	for _, programs := range a.programs {
		for _, p := range programs {
			own[p.id] = true
		}
	}
	for _, id := range a.hooks.attached() {
		if !own[id] {
			return false
		}
	}
	return true
}

// applyXDP attaches the XDP program after the others: it leaves them what it does not do.
func (a *Attacher) applyXDP(ifaces []Interface) error {
	if a.xdp == nil {
		return UnpinXDP(a.cfg.PinDir)
	}
	return a.xdp.sync(ifaces, a.devices)
}

// externalFirst sorts external devices first and leaves out ignored ones. Attaching
// waits for an RCU grace period in the kernel, some 15 ms with the rtnl lock held. With
// hundreds of new pods this takes seconds, and the network must not wait for them.
func externalFirst(ifaces []Interface) []Interface {
	var res []Interface
	for _, role := range []Role{External, PodSide} {
		for _, i := range ifaces {
			if i.Role == role {
				res = append(res, i)
			}
		}
	}
	return res
}

// reportPodsMeanwhile reports pods during a long series of attachments.
func (a *Attacher) reportPodsMeanwhile() {
	if time.Since(a.podsReported) < podWait {
		return
	}
	a.pending.merge(a.events.flushNamespaces())
	a.reportPods()
}

func (a *Attacher) attachTo(i Interface, wanted map[hook]bool, verify bool) Status {
	st := Status{Interface: i}
	programs, err := a.programsOf(i)
	if err != nil {
		st.Err = err
		return st
	}
	var errs []error
	for _, dir := range []direction{ingress, egress} {
		p, ok := programs[dir]
		if !ok {
			continue
		}
		h := hook{i.Ifindex, dir}
		wanted[h] = true
		switch err := a.hooks.ensure(h, p, verify); {
		case err == nil:
			st.Attached = append(st.Attached, string(dir))
		case !vanished(err): // A vanished interface is no failure.
			errs = append(errs, fmt.Errorf("attach to %s: %w", dir, err))
		}
	}
	st.Err = errors.Join(errs...)
	return st
}

// load finds the hooks of an earlier run, and removes those of the other mechanism.
func (a *Attacher) load() error {
	if err := dropAll(a.newHooks(!a.tcx)); err != nil {
		return fmt.Errorf("detach previousLayout hooks: %w", err)
	}
	return a.hooks.load()
}

// report reports a new error to OnError, and its end.
func (a *Attacher) report(iface string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if a.failed[iface] == text {
		return
	}
	if a.failed[iface] = text; text == "" {
		delete(a.failed, iface)
	}
	if a.cfg.OnError != nil {
		a.cfg.OnError(iface, err)
	}
}

// forget deletes the errors of deleted interfaces.
func (a *Attacher) forget(ifaces []Interface) {
	names := make(map[string]bool, len(ifaces))
	for _, i := range ifaces {
		names[i.Name] = true
	}
	maps.DeleteFunc(a.failed, func(name, _ string) bool { return name != "" && !names[name] })
}
