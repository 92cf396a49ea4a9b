package doctor

import (
	"net/netip"
	"strings"
	"testing"
)

// TestTunnelsThatFilterStrictly has the kernel's own settings of tunnels and of other devices.
func TestTunnelsThatFilterStrictly(t *testing.T) {
	ns := newNamespace(t, "rpfilter")
	inside(t, ns, `ip link add uplink type veth peer name far; ip link set uplink up; ip link set far up; ip addr add 192.0.2.1/24 dev uplink; ip route add default via 192.0.2.254
ip link add flannel.1 type vxlan id 1 dstport 8472 dev uplink local 192.0.2.1 nolearning; ip link set flannel.1 up
ip addr add 10.244.0.0/32 dev flannel.1; ip route add 10.244.1.0/24 dev flannel.1
sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.flannel/1.rp_filter=0 net.ipv4.conf.uplink.rp_filter=1`)
	pods := &Traffic{DSR: DSRReplies{ThroughStack: []DSREndpoint{{Endpoint: netip.MustParseAddrPort("10.244.0.2:80"), Pod: "shop/web-0",
		Node: "n1", Service: "shop/web:http"}}}}
	find := func() []Finding {
		n, _ := examine(t, ns)
		n.Namespaces[0].Report.Namespace.Own, n.Traffic = true, pods
		return Examine(n, "rp-filter-strict")
	}
	for _, row := range []struct {
		change string
		found  bool
	}{
		{"true", false}, // off
		{"sysctl -w net.ipv4.conf.flannel/1.rp_filter=1", true},
		{"sysctl -w net.ipv4.conf.all.rp_filter=2", false},
		{"sysctl -w net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.flannel/1.rp_filter=0", true},
		{"ip route replace default dev flannel.1", false},
		{"ip route replace default via 192.0.2.254", true},
	} {
		inside(t, ns, row.change)
		found := find()
		if (len(found) == 1) != row.found {
			t.Fatalf("after %s: %+v", row.change, found)
		}
	}
	pod := &pods.DSR.ThroughStack[0]
	f := find()[0]
	if !strings.Contains(f.Title, "of flannel.1 drops clients' packets to 1 Pod") ||
		!strings.Contains(strings.Join(f.Evidence, "\n"), "pod shop/web-0 (10.244.0.2:80) on node n1 of Service shop/web:http") {
		t.Errorf("%+v", f)
	}
	pod.Endpoint = netip.MustParseAddrPort("[fd00::2]:80")
	if found := find(); len(found) > 0 {
		t.Errorf("IPv6 has no such filter: %+v", found)
	}
	pod.Endpoint = netip.MustParseAddrPort("10.244.0.2:80")
	inside(t, ns, f.Commands[0])
	if found := find(); len(found) > 0 {
		t.Errorf("after its remedy: %+v", found)
	}
	inside(t, ns, "sysctl -w net.ipv4.conf.flannel/1.rp_filter=1")
	if pods.DSR.ThroughStack = nil; len(find()) > 0 {
		t.Error("found although no Pod's DSR packets traverse the stack")
	}
}
