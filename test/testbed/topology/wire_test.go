package topology_test

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

func TestBulkFitsThroughEveryPodNetwork(t *testing.T) {
	const size = 1 << 20
	for _, test := range []struct {
		name    string
		network string
		v4, v6  bool
		mtu     int
	}{
		{"routed", topology.Routed, true, true, 1500},
		{"vxlan IPv4 alone", topology.VXLAN, true, false, 1450},
		{"vxlan IPv6 alone", topology.VXLAN, false, true, 1430},
		{"vxlan dual stack", topology.VXLAN, true, true, 1430},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec := topology.DefaultSpec(name("b"))
			spec.PodNetwork, spec.IPv4, spec.IPv6, spec.PodsPerNode = test.network, test.v4, test.v6, 1
			c := up(t, spec)
			server, client := c.Pod(1, 0), c.Pod(0, 0)
			var eth0 *net.Interface
			if err := server.Do(func() (err error) { eth0, err = net.InterfaceByName("eth0"); return err }); err != nil {
				t.Fatal(err)
			}
			if eth0.MTU != test.mtu {
				t.Errorf("MTU of pods: got %d, want %d", eth0.MTU, test.mtu)
			}
			if _, err := workload.Start(t.Context(), server, workload.Config{Kind: workload.HTTP, Listen: ":80", Size: size}); err != nil {
				t.Fatal(err)
			}
			for _, a := range server.Addrs() {
				out, err := client.Command(t.Context(), "curl", "-sS", "-m", "5", "--noproxy", "*",
					"http://"+netip.AddrPortFrom(a, 80).String()).Output()
				if err != nil || len(out) != size {
					t.Errorf("from %s: got %d bytes, %v", a, len(out), err)
				}
			}
		})
	}
}

// A dataplane finds a pod's host-side interface by these.
func TestPodDevicesPointToTheirPods(t *testing.T) {
	c := up(t, topology.DefaultSpec(name("v")))
	pod := c.Pod(1, 2)
	var dev netlink.Link
	var hairpin []byte
	nsid := -1
	err := c.Node(1).Do(func() (err error) {
		if dev, err = netlink.LinkByName(pod.NodeDevice); err != nil {
			return err
		}
		ns, err := netns.GetFromName(pod.Namespace)
		if err != nil {
			return err
		}
		defer ns.Close()
		nsid, err = netlink.GetNetNsIdByFd(int(ns))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if dev.Attrs().NetNsID != nsid || nsid < 0 {
		t.Errorf("%s points to namespace %d, the pod's is %d", pod.NodeDevice, dev.Attrs().NetNsID, nsid)
	}
	hairpin, err = c.Node(1).Command(t.Context(), "bridge", "-d", "link", "show", "dev", pod.NodeDevice).Output()
	if err != nil || !strings.Contains(string(hairpin), "hairpin on") {
		t.Errorf("bridge port: got %q, %v, want hairpin on", hairpin, err)
	}
}

func TestSysctls(t *testing.T) {
	spec := topology.DefaultSpec(name("s"))
	spec.RPFilter = 2
	c := up(t, spec)
	for _, test := range []struct {
		host      *topology.Host
		key, want string
	}{
		{c.Node(0), "ipv4/ip_forward", "1"},
		{c.Node(0), "ipv6/conf/all/forwarding", "1"},
		{c.Node(0), "ipv6/conf/veth0/accept_dad", "0"},
		{c.Node(0), "ipv4/conf/cni0/rp_filter", "2"},
		{c.Pod(0, 0), "ipv4/ip_forward", "0"},
		{c.Pod(0, 0), "ipv6/conf/all/forwarding", "0"},
		{c.Client(0), "ipv6/conf/eth0/accept_ra", "0"},
	} {
		var got []byte
		if err := test.host.Do(func() (err error) { got, err = os.ReadFile("/proc/sys/net/" + test.key); return err }); err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(string(got)) != test.want {
			t.Errorf("%s: net/%s is %q, want %s", test.host.Name, test.key, got, test.want)
		}
	}
}
