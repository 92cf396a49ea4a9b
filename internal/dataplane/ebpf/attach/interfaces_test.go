package attach

import "testing"

func TestClassify(t *testing.T) {
	const br0, cni0, bond0, ovs, vrf0 = 100, 101, 102, 103, 104
	masters := []device{
		{index: br0, name: "br0", kind: "bridge", encap: "ether", nsid: -1, wideAddr: true},
		{index: cni0, name: "cni0", kind: "bridge", encap: "ether", nsid: -1, wideAddr: true},
		{index: bond0, name: "bond0", kind: "bond", encap: "ether", nsid: -1, wideAddr: true},
		{index: ovs, name: "ovs-system", kind: "openvswitch", encap: "ether", nsid: -1},
		{index: vrf0, name: "vrf0", kind: "vrf", encap: "ether", nsid: -1},
		{index: 110, name: "uplink", kind: "device", encap: "ether", nsid: -1, master: br0},
		{index: 111, name: "vx", kind: "vxlan", encap: "ether", nsid: -1, master: cni0},
	}
	for _, c := range []struct {
		what string
		dev  device
		want Role
		l3   bool
	}{
		{"NIC with address", device{kind: "device", encap: "ether", nsid: -1, wideAddr: true}, External, false},
		{"NIC without address", device{kind: "device", encap: "ether", nsid: -1}, External, false},
		{"NIC in a bond", device{kind: "device", encap: "ether", nsid: -1, master: bond0}, Ignored, false},
		{"NIC in a bridge", device{kind: "device", encap: "ether", nsid: -1, master: br0}, Ignored, false},
		{"NIC in a VRF", device{kind: "device", encap: "ether", nsid: -1, master: vrf0, wideAddr: true}, External, false},
		{"VLAN", device{kind: "vlan", encap: "ether", nsid: -1, wideAddr: true}, External, false},
		{"a container node's eth0", device{kind: "veth", encap: "ether", nsid: 0, wideAddr: true}, External, false},
		{"unnumbered eth0 of a container node", device{kind: "veth", encap: "ether", nsid: 0, route: true}, External, false},
		{"cali*", device{kind: "veth", encap: "ether", nsid: 0}, PodSide, false},
		{"ptp's host end with the gateway's /32", device{kind: "veth", encap: "ether", nsid: 0, hostAddr: true}, PodSide, false},
		{"netkit", device{kind: "netkit", encap: "ether", nsid: 3}, PodSide, false},
		{"port of cni0", device{kind: "veth", encap: "ether", nsid: 0, master: cni0}, PodSide, false},
		{"VM's tap in a bridge", device{kind: "tuntap", encap: "ether", nsid: -1, master: br0}, PodSide, false},
		{"pod at Open vSwitch", device{kind: "veth", encap: "ether", nsid: 0, master: ovs}, PodSide, false},
		{"veth between two bridges here", device{kind: "veth", encap: "ether", nsid: -1, master: cni0}, Ignored, false},
		{"veth with its peer here", device{kind: "veth", encap: "ether", nsid: -1}, Ignored, false},
		{"flannel.1", device{kind: "vxlan", encap: "ether", nsid: -1, hostAddr: true, route: true}, External, false},
		{"unused vxlan", device{kind: "vxlan", encap: "ether", nsid: -1}, Ignored, false},
		{"WireGuard", device{kind: "wireguard", encap: "none", nsid: -1, hostAddr: true}, External, true},
		{"tun with address", device{kind: "tuntap", encap: "none", nsid: -1, wideAddr: true}, External, true},
		{"tunl0 unused", device{kind: "ipip", encap: "ipip", nsid: -1}, Ignored, true},
		{"tunl0 of Calico", device{kind: "ipip", encap: "ipip", nsid: -1, hostAddr: true}, External, true},
		{"kube-ipvs0", device{kind: "dummy", encap: "ether", nsid: -1, wideAddr: true}, Ignored, false},
		{"lo", device{kind: "device", encap: "loopback", loopback: true, nsid: -1, hostAddr: true}, Ignored, true},
		{"docker0", device{kind: "bridge", encap: "ether", nsid: -1, wideAddr: true}, Ignored, false},
	} {
		c.dev.index, c.dev.name = 1, c.what
		got := classify(append([]device{c.dev}, masters...))
		if got[0].Role != c.want || got[0].L3 != c.l3 {
			t.Errorf("%s: %s, L3 %v; want %s, %v", c.what, got[0].Role, got[0].L3, c.want, c.l3)
		}
		for _, i := range got {
			switch {
			case i.Ifindex == br0 && i.Role != External:
				t.Errorf("bridge with a NIC: %s", i.Role)
			case i.Ifindex == cni0 && i.Role != Ignored:
				t.Errorf("bridge of pods: %s", i.Role)
			}
		}
	}
}
