package attach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/node/kernel"
)

// Sync looks at everything once: it tells uplinks and pods, attaches what is
// missing, replaces programs of an earlier run and removes what belongs to
// nothing. The error joins those of the single interfaces that failed; the
// others are served.
func (a *Attacher) Sync(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return kernel.Do(a.ns, func() error {
		d := a.news.take()
		d.all = true
		return a.syncAll(d)
	})
}

// syncAll tells of pods before it attaches programs that want to know them.
func (a *Attacher) syncAll(d dirty) error {
	seen, err := a.look(d)
	if err != nil {
		return err
	}
	a.pending = dirty{all: true}
	a.tellPods()
	return a.apply(seen, d)
}

// pass brings hooks and uplinks up to date and reports whether it wants to be
// tried again soon.
func (a *Attacher) pass(all bool) (again bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	begin := time.Now()
	d := a.news.take()
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

// podPass tells what changed of pods since the last time.
func (a *Attacher) podPass() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tellPods()
}

// reportRefusals tells OnRefused of claims, and returns when to call it again; 0 is
// after the next change.
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

// merge adds what other says is to be looked at.
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

// look reads links, addresses and, when they changed, routes; it tells of
// uplinks and remembers the ports of pods.
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

// listDevices reads routes again only if they changed where it matters: in a
// node that speaks BGP there may be a million.
func (a *Attacher) listDevices(links []netlink.Link, addrs map[int][]netlink.Addr, reread bool) ([]device, error) {
	devices := listDevices(links, addrs, a.routes)
	decided := make(map[int]bool)
	for i := range devices {
		if !devices[i].ambiguous() {
			decided[devices[i].index] = true
		} else if a.decided[devices[i].index] {
			reread = true // Its routes were not followed until now.
		}
	}
	a.decided = decided
	a.news.ignoreRoutes(decided)
	if !reread && a.routes.wide != nil {
		return devices, nil
	}
	rs, err := listRoutes(a.h)
	if err != nil {
		return nil, err
	}
	a.routes = rs
	return listDevices(links, addrs, rs), nil
}

// tellPods reads pods that have news and calls OnPods with the differences.
func (a *Attacher) tellPods() {
	a.podsTold = time.Now()
	d := a.pending
	a.pending = dirty{}
	routing := d.rules || len(d.paths) > 0
	if !d.all && !d.links && !d.neighs && len(d.nsids) == 0 && !d.facts && !routing {
		return
	}
	a.pods.paths.forget(d.paths, d.all || d.rules)
	claims := a.pods.read(d.nsids, d.all) || d.all || d.links || d.neighs
	if !claims && !d.facts && !routing {
		return // News of namespaces without pods of ours.
	}
	a.pods.collect(claims)
	// Before the kernel is asked: a route that changes in between is news.
	a.news.watchRoutes(a.pods.claimed())
	c := a.pods.changes()
	a.news.watchNeighbours(a.pods.neighbourWatch())
	if a.cfg.OnPods != nil && (c.Full || len(c.Upserts)+len(c.Deletes) > 0) {
		a.cfg.OnPods(PodChanges{Full: c.Full, Upserts: maps.Clone(c.Upserts), Deletes: append([]netip.Addr(nil), c.Deletes...)})
	}
}

// apply attaches to and detaches from interfaces.
func (a *Attacher) apply(ifaces []Interface, d dirty) error {
	if !a.loaded {
		if err := a.load(); err != nil {
			return err
		}
		a.loaded = true
		d.all = true
	}
	wanted := make(map[hook]bool)
	status := make(map[int]Status)
	var errs []error
	for _, i := range outwardFirst(ifaces) {
		a.tellPodsMeanwhile()
		st := a.attachTo(i, wanted, d.all || d.gone[i.Ifindex])
		if st.Err != nil {
			errs = append(errs, fmt.Errorf("interface %s: %w", i.Name, st.Err))
		}
		a.report(i.Name, st.Err)
		status[i.Ifindex] = st
	}
	for _, h := range a.hooks.hooks() {
		if wanted[h] {
			continue
		}
		if err := a.hooks.drop(h); err != nil && !vanished(err) {
			errs = append(errs, fmt.Errorf("detach from interface %d: %w", h.ifindex, err))
		}
	}
	a.status = status
	a.forget(ifaces)
	return errors.Join(errs...)
}

// outwardFirst leaves out ignored interfaces. Attaching waits for an RCU grace
// period in the kernel, some 15 ms with the rtnl lock held: hundreds of pods
// take seconds when all are new, and the network must not wait for them.
func outwardFirst(ifaces []Interface) []Interface {
	var res []Interface
	for _, role := range []Role{Outward, PodSide} {
		for _, i := range ifaces {
			if i.Role == role {
				res = append(res, i)
			}
		}
	}
	return res
}

// tellPodsMeanwhile keeps pods from waiting for a long row of interfaces.
func (a *Attacher) tellPodsMeanwhile() {
	if time.Since(a.podsTold) < podWait {
		return
	}
	a.pending.merge(a.news.takeNamespaces())
	a.tellPods()
}

func (a *Attacher) attachTo(i Interface, wanted map[hook]bool, verify bool) Status {
	st := Status{Interface: i}
	var errs []error
	for _, dir := range []direction{ingress, egress} {
		p, ok := a.programs[i.Role][dir]
		if !ok {
			continue
		}
		h := hook{i.Ifindex, dir}
		wanted[h] = true
		switch err := a.hooks.ensure(h, p, verify); {
		case err == nil:
			st.Attached = append(st.Attached, string(dir))
		case !vanished(err): // One that vanished since is no failure.
			errs = append(errs, fmt.Errorf("attach to %s: %w", dir, err))
		}
	}
	st.Err = errors.Join(errs...)
	return st
}

// load finds what an earlier run left, and removes what it left by the other
// mechanism.
func (a *Attacher) load() error {
	if err := dropAll(a.newHooks(!a.tcx)); err != nil {
		return fmt.Errorf("detach previousLayout hooks: %w", err)
	}
	return a.hooks.load()
}

// report tells OnError of an error that it has not heard, and of its end.
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

// forget drops the errors of interfaces that are there no more.
func (a *Attacher) forget(ifaces []Interface) {
	names := make(map[string]bool, len(ifaces))
	for _, i := range ifaces {
		names[i.Name] = true
	}
	maps.DeleteFunc(a.failed, func(name, _ string) bool { return name != "" && !names[name] })
}
