package e2e

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// tunnelDevice has no Ethernet header, as those of WireGuard and IPIP, which the kernel of
// the tests may lack.
const tunnelDevice = "tun9"

// TestTunnelWithoutEthernet: the nodes reach each other's pods by devices without Ethernet
// headers, which a process connects.
func TestTunnelWithoutEthernet(t *testing.T) { tunnelWithoutEthernet(t, "e2e-tunnel") }

// An agent without the right to load programs has loaded those for such a device before.
func TestTunnelWithoutEthernetOrCapabilities(t *testing.T) {
	tunnelWithoutEthernet(t, "e2e-tunnel-drop", "--drop-capabilities")
}

func tunnelWithoutEthernet(t *testing.T, name string, flags ...string) {
	t.Helper()
	e := startSpec(t, topology.DefaultSpec(name), flags...)
	a, err := e.Host("a")
	must.Do(t, err)
	b, err := e.Host("b")
	must.Do(t, err)
	devices := map[*topology.Host]*os.File{a: newTunnel(t, a, b), b: newTunnel(t, b, a)}
	go relay(devices[a], devices[b])
	go relay(devices[b], devices[a])

	s := e.Load(t, nodePort("b0"))
	e.expect(t, "endpoint behind the tunnel", s, "b0")

	// The tunnel is the way in: by an address of node a that only its device has.
	by := func(s *suite.File, want func(probe.Answer) bool) {
		for _, combo := range flows.AllCombos {
			dst, err := netip.ParseAddrPort(s.MustAddress(t, flows.NodePort("a"), combo))
			must.Do(t, err)
			to := netip.AddrPortFrom(a.PodCIDRs[0].Addr(), dst.Port())
			if dst.Addr().Is6() {
				to = netip.AddrPortFrom(a.PodCIDRs[1].Addr(), dst.Port())
			}
			for _, got := range ask(t, e.MustProbe(t, "b0"), to.String(), combo, 2) {
				if !want(got) {
					t.Errorf("NodePort at %s by the tunnel, %s: answer %+v", to, combo, got)
				}
			}
		}
	}
	by(e.Load(t, nodePort("a0")), func(got probe.Answer) bool { return got.Server == "a0" })
	by(e.Load(t, nodePort()), func(got probe.Answer) bool { return got.Err == probe.Refused })
}

// newTunnel makes a node's end of the tunnel, and routes the other node's pods by it.
func newTunnel(t *testing.T, node, other *topology.Host) *os.File {
	t.Helper()
	tun := &netlink.Tuntap{
		LinkAttrs: netlink.LinkAttrs{Name: tunnelDevice},
		Mode:      netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI, Queues: 1,
	}
	must.Do(t, node.Do(func() error {
		if err := netlink.LinkAdd(tun); err != nil {
			return err
		}
		link, err := netlink.LinkByName(tunnelDevice)
		if err != nil {
			return err
		}
		errs := []error{netlink.LinkSetUp(link)}
		for i, own := range node.PodCIDRs {
			addr := netip.PrefixFrom(own.Addr(), own.Addr().BitLen())
			errs = append(errs, netlink.AddrReplace(link, &netlink.Addr{IPNet: ipNet(addr)}),
				netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(other.PodCIDRs[i])}))
		}
		return errors.Join(errs...)
	}))
	t.Cleanup(func() { tun.Fds[0].Close() })
	return tun.Fds[0]
}

// relay sends packets on until its ends are closed.
func relay(to, from *os.File) {
	packet := make([]byte, 1<<16)
	for {
		n, err := from.Read(packet)
		if err != nil {
			return
		}
		if _, err := to.Write(packet[:n]); err != nil && errors.Is(err, os.ErrClosed) {
			return
		}
	}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
