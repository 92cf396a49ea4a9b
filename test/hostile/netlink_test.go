package hostile

import (
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// TestAPodFloodsTheAgentWithNetlinkEvents: a pod with CAP_NET_ADMIN changes its addresses,
// neighbors and the state of its interface as fast as it can, but for a pause of 0.1 ms. The agent reads the events of every
// pod. Others' Services change meanwhile, a policy comes, and the agent is started again.
func TestAPodFloodsTheAgentWithNetlinkEvents(t *testing.T) {
	e := start(t, "hostile-netlink")
	state := tenantState{allowed: honest, endpoint: "a0"}
	e.file = e.Load(t, state.objects()...)
	e.wantTenants(t, "before", state)
	e.enforce(t, "ip daddr "+e.Addr(selected, false).String()+" drop\nip6 daddr "+e.Addr(selected, true).String()+" drop")

	changes, end := e.floodNetlink(t, "a1")
	for _, s := range []tenantState{
		{allowed: another, endpoint: "a2", policy: true},
		{allowed: honest, endpoint: "a0", deleted: true, policy: true},
	} {
		e.changeTenants(t, "during the flood", s)
		state = s
	}
	agent := e.Agent(receiver)
	if err := agent.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := agent.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := agent.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	state.endpoint = "a2"
	e.changeTenants(t, "after a start of the agent in the flood", state)
	before := changes.Load()
	end()
	if before < 1000 {
		t.Errorf("the pod made only %d changes", before)
	}
	t.Logf("%d changes", before)
}

// floodNetlink has a pod change its own network until end is called.
func (e *env) floodNetlink(t *testing.T, pod string) (changes *atomic.Int64, end func()) {
	t.Helper()
	host, err := e.Host(pod)
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	changes = new(atomic.Int64)
	done := make(chan error, 1)
	go func() {
		done <- host.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
			for i := 0; !stop.Load(); i++ {
				addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 199, byte(i>>8), byte(i)), Mask: net.CIDRMask(32, 32)}}
				neigh := &netlink.Neigh{LinkIndex: link.Attrs().Index, IP: addr.IP, HardwareAddr: mac, State: netlink.NUD_PERMANENT}
				for _, change := range []func() error{
					func() error { return netlink.AddrAdd(link, addr) },
					func() error { return netlink.NeighSet(neigh) },
					func() error { return netlink.NeighDel(neigh) },
					func() error { return netlink.AddrDel(link, addr) },
				} {
					if change() == nil {
						changes.Add(1)
					}
				}
				if i%100 == 0 {
					_ = netlink.LinkSetDown(link)
					_ = netlink.LinkSetUp(link)
				}
				time.Sleep(100 * time.Microsecond) // leaves the machine's other tests some CPU
			}
			return nil
		})
	}()
	end = func() {
		if stop.Swap(true) {
			return
		}
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("the flood does not end")
		}
	}
	t.Cleanup(end)
	return changes, end
}
