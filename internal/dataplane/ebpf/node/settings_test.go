package node

import (
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/must"
)

func TestUnknownPoliciesKeepEverythingInTheStack(t *testing.T) {
	for bypass, want := range map[string]objects.TCSettingsFlags{
		objects.BypassAuto:   objects.TCSettingsFlagsSETTING_BYPASS_NEVER,
		objects.BypassNever:  objects.TCSettingsFlagsSETTING_BYPASS_NEVER,
		objects.BypassAlways: objects.TCSettingsFlagsSETTING_BYPASS_NEVER, // whose are not known, is for intent to say
	} {
		b := newWriter(t, objects.Config{Bypass: bypass, Timeouts: objectstest.Timeouts})
		must.Do(t, b.Write(&intent.Node{PoliciesUnknown: true}))
		if got := objects.TCSettingsFlags(objectstest.Settings(t, b.objects).Flags); got != want {
			t.Errorf("%s: flags %b, want %b", bypass, got, want)
		}
	}
	b := newWriter(t, objects.Config{Bypass: objects.BypassAuto, Timeouts: objectstest.Timeouts})
	must.Do(t, b.Write(&intent.Node{PoliciesUnknown: true}))
	must.Do(t, b.Write(&intent.Node{}))
	if got := objectstest.Settings(t, b.objects).Flags; got != 0 {
		t.Errorf("flags %b are left when policies are known", got)
	}
}

func TestSettings(t *testing.T) {
	netnstest.Enter(t)
	must.Do(t, kernel.WriteSysctl("net.ipv4.ip_local_port_range", "20000 29999"))
	must.Do(t, kernel.WriteSysctl("net.ipv4.ip_local_reserved_ports", "5000,40000-40009"))
	v4, v6 := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")
	other := netip.MustParseAddr("192.0.2.9")
	b := newWriter(t, objects.Config{Bypass: objects.BypassNever, Timeouts: objectstest.Timeouts})
	node := &intent.Node{
		Addrs: []netip.Addr{v4, other, v6}, NodePortAddrs: []netip.Addr{other}, MasqueradeAll: true,
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
	}
	must.Do(t, b.Write(node))

	s := objectstest.Settings(t, b.objects)
	if got, want := [6]uint32{s.TimeoutNew, s.TimeoutTcp, s.TimeoutClosing, s.TimeoutClosed, s.TimeoutUdpNew, s.TimeoutUdp},
		[6]uint32{60, 600, 120, 100, 70, 80}; got != want {
		t.Errorf("time-outs %v, want %v", got, want)
	}
	if got, want := objects.TCSettingsFlags(s.Flags),
		objects.TCSettingsFlagsSETTING_MASQUERADE_ALL|objects.TCSettingsFlagsSETTING_BYPASS_NEVER; got != want {
		t.Errorf("flags %b, want %b", got, want)
	}
	if s.NodeV4 != objects.ToAddr(v4) || s.NodeV6 != objects.ToAddr(v6) {
		t.Errorf("addresses %v %v", s.NodeV4, s.NodeV6)
	}
	wantSNATPorts(t, b, s)
	objectstest.WantSame(t, "node addresses", objectstest.ReadAll[objects.TCAddrKey, uint32](t, b.m(objects.TCMapNodeAddrs)),
		map[objects.TCAddrKey]uint32{
			objects.AddrKey(v4): 0, objects.AddrKey(v6): 0, objects.AddrKey(other): uint32(objects.TCNodeAddrFlagsNODE_ADDR_NODEPORT),
		})

	// An address is removed; an external device names the primary one.
	b.OnUplinks(map[int]attach.Uplink{3: {V4: other}})
	must.Do(t, b.Write(&intent.Node{Addrs: []netip.Addr{v4, other}}))
	s = objectstest.Settings(t, b.objects)
	if s.NodeV4 != objects.ToAddr(other) || s.NodeV6 != (objects.TCAddr{}) ||
		objects.TCSettingsFlags(s.Flags) != objects.TCSettingsFlagsSETTING_BYPASS_NEVER {
		t.Errorf("settings %+v", s)
	}
	objectstest.WantSame(t, "node addresses", objectstest.ReadAll[objects.TCAddrKey, uint32](t, b.m(objects.TCMapNodeAddrs)),
		map[objects.TCAddrKey]uint32{objects.AddrKey(v4): 0, objects.AddrKey(other): 0})
	objectstest.WantSame(t, "outward interfaces", objectstest.ReadAll[uint32, objects.TCUplink](t, b.m(objects.TCMapUplinks)),
		map[uint32]objects.TCUplink{3: {V4: objects.ToAddr(other)}})
	if ranges := objectstest.ReadAll[objects.TCRangeKey, uint8](t, b.m(objects.TCMapSourceRanges)); len(ranges) > 0 {
		t.Errorf("pod ranges %v are left", ranges)
	}

	// Other interfaces take the place of these.
	b.OnUplinks(map[int]attach.Uplink{4: {V6: v6}})
	objectstest.WantSame(t, "outward interfaces", objectstest.ReadAll[uint32, objects.TCUplink](t, b.m(objects.TCMapUplinks)),
		map[uint32]objects.TCUplink{4: {V6: objects.ToAddr(v6)}})
	// Too few ports are an error, not a division by zero in the kernel.
	must.Do(t, kernel.WriteSysctl("net.ipv4.ip_local_port_range", "1024 65535"))
	if err := b.Write(node); err == nil || !strings.Contains(err.Error(), "ip_local_port_range") {
		t.Errorf("error %v, want one about ip_local_port_range", err)
	}
}

func wantSNATPorts(t *testing.T, b *Writer, s objects.TCSettings) {
	t.Helper()
	listed := map[uint16]bool{}
	ports := objectstest.ReadAll[uint32, uint16](t, b.m(objects.TCMapSnatPorts))
	for i := range s.SnatPorts + s.NetworkPorts {
		listed[ports[i]] = true
		if (i < s.SnatPorts) == (ports[i]%8 == networkPortOf8) {
			t.Errorf("port %d stands in the list of others", ports[i])
		}
	}
	for p := range 1 << 16 {
		banned := p < 1024 || p == 5000 || p >= 20000 && p <= 32767 || p >= 40000 && p <= 40009
		if listed[uint16(p)] == banned {
			t.Fatalf("port %d: listed %t, banned %t", p, listed[uint16(p)], banned)
		}
	}
	if n := s.SnatPorts + s.NetworkPorts; len(listed) != int(n) {
		t.Errorf("%d ports listed %d times", len(listed), n)
	}
}
