package attach

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func TestSyncAttachesByRole(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	addLink(t, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0"}})
	addAddr(t, "cni0", "10.244.1.1/24")
	newPod(t, "veth1")
	setMaster(t, "veth1", "cni0")

	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	wantPrograms(t, eth0, progs.FromNetwork, progs.ToNetwork)
	wantPrograms(t, ifindex(t, "veth1"), progs.FromPod, progs.ToPod)
	wantPrograms(t, ifindex(t, "cni0"), nil, nil)
	wantPrograms(t, loopbackIndex, nil, nil)
	if got := a.Status(); len(got) != 2 || len(got[0].Attached) != 2 || got[0].Err != nil {
		t.Errorf("status %+v, want two interfaces with two hooks each", got)
	}
}

func TestRunFollowsInterfaces(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	addDummyNIC(t, "eth0", "192.0.2.1/24")
	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	run(t, a)

	newPod(t, "cali1")
	first := ifindex(t, "cali1")
	await.NoError(t, func() error { return samePrograms(t, first, ingress, progs.FromPod) })
	await.NoError(t, func() error { return samePrograms(t, first, egress, progs.ToPod) })

	// A new name is the same interface.
	before := attached(t, first, ingress)
	l, err := netlink.LinkByName("cali1")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetDown(l)) // before 6.2 one that is up keeps its name
	must.Do(t, netlink.LinkSetName(l, "cali2"))
	must.Do(t, netlink.LinkSetUp(l))
	await.NoError(t, func() error { return statusHas(a, "cali2") })
	if got := attached(t, first, ingress); !slices.Equal(got, before) {
		t.Errorf("after renaming: %v, want %v", got, before)
	}

	delLink(t, "cali2")
	await.NoError(t, func() error { return noPins(t, dir, first) })
}

// A new interface of an old name is another, even with the index of the old.
func TestInterfaceReplacedBetweenTwoLooks(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	newPod(t, "cali1")
	index := ifindex(t, "cali1")
	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	delLink(t, "cali1")
	addVeth(t, "cali1", index)
	for _, e := range []struct {
		dir  direction
		want *ebpf.Program
	}{{ingress, progs.FromPod}, {egress, progs.ToPod}} {
		await.NoError(t, func() error {
			a.pass(false)
			return samePrograms(t, index, e.dir, e.want)
		})
	}
}

func TestRoleChangeReplacesProgramsInPlace(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	newPod(t, "eth0")
	index := ifindex(t, "eth0")
	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	run(t, a)
	wantPrograms(t, index, progs.FromPod, progs.ToPod)
	before := attached(t, index, ingress)[0].link

	addAddr(t, "eth0", "192.0.2.1/24")
	await.NoError(t, func() error { return samePrograms(t, index, ingress, progs.FromNetwork) })
	if got := attached(t, index, ingress)[0].link; got != before {
		t.Errorf("link %d, want %d kept", got, before)
	}
	// Addresses off, but a default route: still outward.
	l, err := netlink.LinkByName("eth0")
	must.Do(t, err)
	must.Do(t, netlink.AddrDel(l, parseCIDR(t, "192.0.2.1/24")))
	await.NoError(t, func() error { return samePrograms(t, index, ingress, progs.FromPod) })
	must.Do(t, netlink.RouteAdd(&netlink.Route{LinkIndex: index, Scope: netlink.SCOPE_LINK,
		Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}))
	await.NoError(t, func() error { return samePrograms(t, index, ingress, progs.FromNetwork) })
}

func TestRestartTakesOverLinks(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	newPod(t, "gone")
	newPod(t, "moved")
	gone := ifindex(t, "gone")
	moved := ifindex(t, "moved")
	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	before := map[direction][]attachment{ingress: attached(t, eth0, ingress), egress: attached(t, eth0, egress)}
	a.Close()

	// Between two scans, one interface vanishes, one moves to another
	// namespace, where it keeps its index, and another gets that index here.
	delLink(t, "gone")
	elsewhere := newPod(t, "other")
	l, err := netlink.LinkByName("moved")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetNsFd(l, int(elsewhere.ns)))
	addVeth(t, "came", moved)

	fresh := classifiers(t)
	b := newAttacher(t, Config{PinDir: dir, Programs: fresh})
	must.Do(t, b.Sync(context.Background()))
	for dir, was := range before {
		now := attached(t, eth0, dir)
		if len(now) != 1 || now[0].link != was[0].link {
			t.Errorf("%s: %v, want link %d kept", dir, now, was[0].link)
		}
	}
	wantPrograms(t, eth0, fresh.FromNetwork, fresh.ToNetwork)
	wantPrograms(t, moved, fresh.FromPod, fresh.ToPod)
	if err := noPins(t, dir, gone); err != nil {
		t.Error(err)
	}
	must.Do(t, inNetns(elsewhere.ns, func() error {
		for _, dir := range []direction{ingress, egress} {
			if err := samePrograms(t, moved, dir); err != nil {
				return fmt.Errorf("moved interface keeps its programs: %w", err)
			}
		}
		return nil
	}))
}

func TestForeignProgramStaysBehindOurs(t *testing.T) {
	needsTCX(t)
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	foreign := classifier(t, 0)
	l, err := link.AttachTCX(link.TCXOptions{Interface: eth0, Program: foreign, Attach: ebpf.AttachTCXIngress})
	must.Do(t, err)
	defer l.Close()

	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	must.Do(t, samePrograms(t, eth0, ingress, progs.FromNetwork, foreign))
	must.Do(t, a.Detach())
	must.Do(t, samePrograms(t, eth0, ingress, foreign))
}

func TestResyncRepairs(t *testing.T) {
	needsTCX(t)
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))

	// Another program detaches one link and removes the other's pin.
	l, err := link.NewFromID(attached(t, eth0, ingress)[0].link)
	must.Do(t, err)
	must.Do(t, l.Detach())
	l.Close()
	wantPins := pins(t, dir)
	must.Do(t, (&tcxHooks{dir: a.linksDir()}).drop(hook{eth0, egress}))
	must.Do(t, a.Sync(context.Background()))
	wantPrograms(t, eth0, progs.FromNetwork, progs.ToNetwork)
	if got := pins(t, dir); !slices.Equal(got, wantPins) {
		t.Errorf("pins %v, want %v", got, wantPins)
	}
}

func TestClsact(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	foreign := clsactFilter(hook{eth0, ingress})
	foreign.Handle, foreign.Name, foreign.Priority = 1, "foreign", 1
	foreign.Fd = classifier(t, tcxNext).FD()
	must.Do(t, netlink.QdiscAdd(clsactQdisc(eth0)))
	must.Do(t, netlink.FilterAdd(foreign))

	for range 2 { // The second finds the filters of the first.
		a := newAttacher(t, Config{PinDir: dir, Programs: progs, ForceClsact: true})
		must.Do(t, a.Sync(context.Background()))
		wantFilters(t, eth0, ingress, progs.FromNetwork, "foreign")
		wantFilters(t, eth0, egress, progs.ToNetwork)
		stop := run(t, a)
		newPod(t, "cali1")
		index := ifindex(t, "cali1")
		await.NoError(t, func() error { return sameFilters(t, index, egress, progs.ToPod) })
		stop()
		a.Close()
		delLink(t, "cali1")
		progs = classifiers(t)
	}
	if !kernel.HaveTCX() {
		return
	}
	// With tcx, the filters go.
	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	wantPrograms(t, eth0, progs.FromNetwork, progs.ToNetwork)
	wantFilters(t, eth0, ingress, nil, "foreign")
	wantFilters(t, eth0, egress, nil)
}

func TestDetachTwice(t *testing.T) {
	for _, clsact := range []bool{false, true} {
		t.Run(fmt.Sprintf("clsact=%v", clsact), func(t *testing.T) {
			enterNetns(t)
			dir := mountBPF(t)
			eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
			a := newAttacher(t, Config{PinDir: dir, Programs: classifiers(t), ForceClsact: clsact})
			must.Do(t, a.Sync(context.Background()))

			cleaner := newAttacher(t, Config{PinDir: dir})
			for range 2 {
				must.Do(t, cleaner.Detach())
				wantPrograms(t, eth0, nil, nil)
				wantFilters(t, eth0, ingress, nil)
				qdiscs, err := netlink.QdiscList(nil)
				must.Do(t, err)
				for _, q := range qdiscs {
					if q.Type() == "clsact" {
						t.Errorf("clsact left on %d", q.Attrs().LinkIndex)
					}
				}
				if got := pins(t, dir); got != nil {
					t.Errorf("pins left: %v", got)
				}
			}
		})
	}
}

func TestOneFailingInterfaceDoesNotStopTheRest(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	bad := addDummyNIC(t, "bad", "192.0.2.1/24")
	good := addDummyNIC(t, "good", "198.51.100.1/24")
	told := make(map[string]error)
	a := newAttacher(t, Config{
		PinDir: dir, Programs: progs, ForceClsact: true,
		OnError: func(iface string, err error) { told[iface] = err },
	})
	// An ingress queueing discipline has the place of clsact and no egress.
	q := clsactQdisc(bad).(*netlink.GenericQdisc)
	q.QdiscType, q.Parent = "ingress", netlink.HANDLE_INGRESS
	must.Do(t, netlink.QdiscAdd(q))
	err := a.Sync(context.Background())
	if err == nil || !strings.Contains(err.Error(), "interface bad: ") {
		t.Errorf("error %v, want one that names the interface", err)
	}
	wantFilters(t, good, egress, progs.ToNetwork)
	if told["bad"] == nil || told["good"] != nil {
		t.Errorf("told of %v, want of bad alone", told)
	}
	must.Do(t, netlink.QdiscDel(q))
	must.Do(t, a.Sync(context.Background()))
	if told["bad"] != nil {
		t.Errorf("still told of %v", told["bad"])
	}
}

func TestUplinks(t *testing.T) {
	enterNetns(t)
	dir := mountBPF(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	addAddr(t, "eth0", "192.0.2.9/24") // secondary
	addAddr(t, "eth0", "2001:db8::1/64")
	newPod(t, "eth1")
	eth1 := ifindex(t, "eth1")
	must.Do(t, netlink.RouteAdd(&netlink.Route{LinkIndex: eth1, Scope: netlink.SCOPE_LINK, Dst: parseCIDR(t, "203.0.113.0/24").IPNet}))
	changes := make(chan map[int]Uplink, 100)
	a := newAttacher(t, Config{PinDir: dir, OnUplinks: func(u map[int]Uplink) { changes <- u }})
	must.Do(t, a.Sync(context.Background()))
	u := <-changes
	for _, i := range []int{eth0, eth1} { // eth1 has no address of its own.
		if u[i].V4 != addr("192.0.2.1") || u[i].V6 != addr("2001:db8::1") {
			t.Errorf("uplink %d: %+v, want 192.0.2.1 and 2001:db8::1", i, u[i])
		}
	}
	run(t, a)
	addAddr(t, "eth1", "203.0.113.7/24")
	await.NoError(t, func() error {
		a.mu.Lock()
		got := a.uplinks[eth1].V4
		a.mu.Unlock()
		if got != addr("203.0.113.7") {
			return fmt.Errorf("uplink eth1 has %v, want 203.0.113.7", got)
		}
		return nil
	})
}

// addVeth makes the host end of a pod, with the index given.
func addVeth(t *testing.T, name string, index int) {
	t.Helper()
	must.Do(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name, Index: index},
		PeerName:  "peer", PeerNamespace: netlink.NsFd(newPod(t, "to"+name).ns),
	}))
}

func wantFilters(t *testing.T, index int, dir direction, p *ebpf.Program, foreign ...string) {
	t.Helper()
	if err := sameFilters(t, index, dir, p, foreign...); err != nil {
		t.Error(err)
	}
}

func sameFilters(t *testing.T, index int, dir direction, p *ebpf.Program, foreign ...string) error {
	t.Helper()
	l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	filters, err := netlink.FilterList(l, clsactParent(dir))
	if err != nil {
		return err
	}
	var want, got []string
	if p != nil {
		want = append(want, fmt.Sprintf("%s %d", clsactFilterName, programID(t, p)))
	}
	want = append(want, foreign...)
	for _, f := range filters {
		b := f.(*netlink.BpfFilter)
		if b.Name == clsactFilterName {
			got = append(got, fmt.Sprintf("%s %d", b.Name, b.Id))
		} else {
			got = append(got, b.Name)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("interface %d %s: filters %v, want %v", index, dir, got, want)
	}
	return nil
}

func noPins(t *testing.T, dir string, index int) error {
	for _, p := range pins(t, dir) {
		if strings.HasPrefix(p, fmt.Sprintf("%d_", index)) {
			return fmt.Errorf("pin %s is left", p)
		}
	}
	return nil
}

func statusHas(a *Attacher, name string) error {
	for _, s := range a.Status() {
		if s.Name == name && len(s.Attached) == 2 {
			return nil
		}
	}
	return errors.New("no interface " + name + " served")
}

func inNetns(ns netns.NsHandle, f func() error) error {
	home, err := netns.Get()
	if err != nil {
		return err
	}
	defer home.Close()
	if err := netns.Set(ns); err != nil {
		return err
	}
	defer func() { _ = netns.Set(home) }()
	return f()
}
