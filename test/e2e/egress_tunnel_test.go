package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// tunnelMTU is the MTU of the tunnel of TestPodsLeaveByATunnel, in bytes: less than that of pods.
const tunnelMTU = 1300

// TestPodsLeaveByATunnel: the default route of a node leads through a device without Ethernet headers. Pods get the address
// of that device, or the node's own if it has none, and learn its MTU.
func TestPodsLeaveByATunnel(t *testing.T) {
	spec := topology.DefaultSpec("e2e-egress-tun")
	spec.Masquerade = true
	e := startSpec(t, spec, "--egress", "auto")
	node, outside := e.MustHost(t, "a"), e.MustHost(t, "client0")
	own := []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8:7::1")}
	server := []netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("2001:db8:7::7")}
	here, there := defaultTunnel(t, node, own), defaultTunnel(t, outside, server)
	go relay(here, there)
	go relay(there, here)

	leavesAs := func(what string, combo flows.Combo, want netip.Addr) {
		t.Helper()
		to := netip.AddrPortFrom(pick(server, combo), 8080).String()
		p := e.MustProbe(t, "a1")
		await.True(t, what+": a pod leaves as "+want.String()+" without netfilter, "+fmt.Sprint(combo), func() bool {
			before := e.egressCreated(t)
			answers := ask(t, p, to, combo, 3)
			for _, a := range answers {
				if seen, err := netip.ParseAddrPort(a.Source); err != nil || seen.Addr().Unmap() != want {
					return false
				}
			}
			return e.egressCreated(t) >= before+len(answers)
		})
	}
	for _, combo := range flows.AllCombos {
		leavesAs("the tunnel's address", combo, pick(own, combo))
	}
	for _, combo := range flows.UDP {
		to := netip.AddrPortFrom(pick(server, combo), 8080).String()
		// The first is lost, or refused with EMSGSIZE: so the pod learns.
		resp, err := e.MustProbe(t, "a1").Do(t.Context(), probe.Request{
			Op: probe.Try, Proto: combo.Protocol(), Dst: to, Tries: 3, Size: tunnelMTU + 50,
		})
		must.Do(t, err)
		if last := resp.Answers[len(resp.Answers)-1]; last.Err != probe.OK {
			t.Errorf("%s: the pod gets no ICMP error with the MTU: %+v", combo, resp.Answers)
		}
	}
	for i, a := range own {
		e.Output(t, "a", "ip", "address", "delete", netip.PrefixFrom(a, a.BitLen()).String(), "dev", tunnelDevice)
		e.Output(t, "a", "ip", "route", "replace", netip.PrefixFrom(server[i], a.BitLen()).String(), "dev", tunnelDevice)
	}
	for _, combo := range flows.AllCombos {
		leavesAs("a tunnel without an address", combo, e.Addr("a", combo.IPv6()))
	}
}

// pick returns the address of a combo's family.
func pick(addrs []netip.Addr, combo flows.Combo) netip.Addr {
	if combo.IPv6() {
		return addrs[1]
	}
	return addrs[0]
}

// defaultTunnel makes a host's end of the tunnel, with addresses, and the default route by it.
func defaultTunnel(t *testing.T, host *topology.Host, addrs []netip.Addr) *os.File {
	t.Helper()
	tun := &netlink.Tuntap{
		LinkAttrs: netlink.LinkAttrs{Name: tunnelDevice, MTU: tunnelMTU},
		Mode:      netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI, Queues: 1,
	}
	must.Do(t, host.Do(func() error {
		if err := netlink.LinkAdd(tun); err != nil {
			return err
		}
		link, err := netlink.LinkByName(tunnelDevice)
		if err != nil {
			return err
		}
		errs := []error{netlink.LinkSetMTU(link, tunnelMTU), netlink.LinkSetUp(link)}
		for _, a := range addrs {
			all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
			if a.Is6() {
				all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
			}
			errs = append(errs, netlink.AddrReplace(link, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, a.BitLen()))}),
				netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(all)}))
		}
		return errors.Join(errs...)
	}))
	t.Cleanup(func() { tun.Fds[0].Close() })
	return tun.Fds[0]
}
