package drops

import (
	"bytes"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
)

func TestFunctionsAreNamed(t *testing.T) {
	s, err := parseSymbols(strings.NewReader("ffffffff81000100 T ip_rcv\nffffffff81000000 t _stext\nffffffffc0000000 t " +
		"nft_do_chain\t[nf_tables]\nffffffff81000180 d data\n"))
	if err != nil {
		t.Fatal(err)
	}
	for at, want := range map[uint64]string{
		0xffffffff81000100: "ip_rcv+0x0",
		0xffffffff810001ff: "ip_rcv+0xff",
		0xffffffffc0000010: "nft_do_chain [nf_tables]+0x10",
		0xffffffffd0000000: "0xffffffffd0000000",
		0x10:               "0x10",
		0:                  "",
	} {
		if got := s.function(at); got != want {
			t.Errorf("%#x is %q, want %q", at, got, want)
		}
	}
	if _, err := parseSymbols(strings.NewReader("0000000000000000 T ip_rcv\n")); !errors.Is(err, errHidden) {
		t.Errorf("hidden addresses: %v", err)
	}
}

func TestReasonsAreTheKernels(t *testing.T) {
	table := &reasonTable{
		names:   map[uint32]string{3: "NO_SOCKET", 7: "OTHERHOST"},
		numbers: map[string]uint32{"NO_SOCKET": 3, "OTHERHOST": 7},
	}
	for _, row := range []struct {
		c    Config
		want []uint32
		only bool
	}{
		{Config{}, []uint32{7}, false},
		{Config{All: true}, nil, false},
		{Config{Reasons: []string{"no_socket"}}, []uint32{3}, true},
		{Config{Reasons: []string{"!SKB_DROP_REASON_NO_SOCKET"}}, []uint32{3, 7}, false},
	} {
		got, only, err := table.filter(&row.c)
		if err != nil || len(got) != len(row.want) || only != row.only {
			t.Errorf("%+v: %v, %v, %v", row.c, got, only, err)
		}
	}
	var unknown *UnknownReasonError
	if _, _, err := table.filter(&Config{Reasons: []string{"SOCKET_GONE"}}); !errors.As(err, &unknown) ||
		!strings.Contains(err.Error(), "it has NO_SOCKET") {
		t.Errorf("%v", err)
	}
	for number, want := range map[uint32]string{3: "NO_SOCKET", 99: "REASON_99", 2<<16 + 5: "SUBSYSTEM_2_5"} {
		if got := table.name(number); got != want {
			t.Errorf("%d is %s, want %s", number, got, want)
		}
	}
}

// A prefix is compared as the kernel's side does.
func TestPrefixesAreComparedByTheirBits(t *testing.T) {
	for _, row := range []struct {
		prefix, addr string
		want         bool
	}{
		{"10.0.0.0/8", "10.255.0.1", true}, {"10.0.0.0/8", "11.0.0.1", false},
		{"10.0.0.1/32", "10.0.0.1", true}, {"10.0.0.1/32", "10.0.0.2", false}, {"0.0.0.0/0", "1.2.3.4", true},
		{"fd00:1:2::/47", "fd00:1:3::1", true}, {"fd00:1:2::/47", "fd00:1:4::1", false},
		{"fd00::1/128", "fd00::1", true}, {"fd00::1/128", "fd00::2", false},
	} {
		p := prefixes([]netip.Prefix{netip.MustParsePrefix(row.prefix)})[0]
		addr := netip.MustParseAddr(row.addr)
		a := prefixes([]netip.Prefix{netip.PrefixFrom(addr, 0)})[0].Addr
		got := true
		for i := range a {
			got = got && (a[i]^p.Addr[i])&p.Mask[i] == 0
		}
		if got != row.want {
			t.Errorf("%s in %s: %v", row.addr, row.prefix, got)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, row := range []struct {
		c    Config
		want string
	}{
		{Config{Ports: []uint16{0}}, "port 0"},
		{Config{Ports: make([]uint16, 17)}, "17 ports"},
		{Config{Addresses: make([]netip.Prefix, 17)}, "17 addresses"},
		{Config{Pods: []Pod{{Addresses: make([]netip.Addr, 17)}}}, "17 addresses"},
		{Config{Rate: -1}, "rate -1"},
		{Config{Reasons: []string{"A", "!B"}}, "not both"},
	} {
		if err := row.c.Validate(); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%+v: %v", row.c, err)
		}
	}
}

func TestWithoutRootItSaysSo(t *testing.T) {
	real := euid
	t.Cleanup(func() { euid = real })
	euid = func() int { return 1000 }
	if _, err := Follow(Config{}); err == nil || !strings.Contains(err.Error(), "run it as root") {
		t.Errorf("%v", err)
	}
}

// A kernel before 5.17 has the tracepoint, and passes no reason.
func TestAKernelWithoutReasonsIsRefused(t *testing.T) {
	for _, row := range []struct {
		params int
		ok     bool
	}{{3, false}, {4, true}, {5, true}} {
		kernel := specOf(t, row.params)
		if err := givesReasons(kernel); (err == nil) != row.ok || err != nil && !strings.Contains(err.Error(), "5.17") {
			t.Errorf("%d parameters: %v", row.params, err)
		}
		if _, err := readReasons(kernel); err == nil || !strings.Contains(err.Error(), "5.17") {
			t.Errorf("no enum: %v", err)
		}
	}
}

// specOf is the BTF of a kernel whose tracepoint has so many parameters.
func specOf(t *testing.T, params int) *btf.Spec {
	t.Helper()
	proto := &btf.FuncProto{Return: (*btf.Void)(nil)}
	for range params {
		proto.Params = append(proto.Params, btf.FuncParam{Type: &btf.Pointer{Target: (*btf.Void)(nil)}})
	}
	b, err := btf.NewBuilder([]btf.Type{&btf.Typedef{Name: "btf_trace_kfree_skb", Type: &btf.Pointer{Target: proto}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := b.Marshal(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := btf.LoadSpecFromReader(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// The kernel has one reason for a malformed header and for an expired hop limit.
func TestAnExpiredHopLimitIsNotCalledMalformed(t *testing.T) {
	for location, want := range map[string]string{
		"ip_forward+0x1b2": hopsOver, "ip6_forward+0x99": hopsOver, "ip_forward.cold+0x3": hopsOver,
		"ip_rcv_core+0x1": meanings["IP_INHDR"], "": meanings["IP_INHDR"],
	} {
		d := Drop{Reason: "IP_INHDR", Place: Place{Location: location}}
		if got := explain(&d, dropsDropPathPATH_NONE); got != want {
			t.Errorf("%s: %s", location, got)
		}
	}
}

// NAT drops redirects for translated connections. It does not drop packets for want of a port.
func TestPacketsThatNATDrops(t *testing.T) {
	d := Drop{Reason: netfilterDrop, Packet: Packet{Protocol: "icmp", ICMP: "5/1"}}
	if got := explain(&d, dropsDropPathPATH_NAT); got != redirected {
		t.Error(got)
	}
	d.ICMP = "8/0"
	if got := explain(&d, dropsDropPathPATH_NAT); !strings.Contains(got, "the device it leaves by has no address") {
		t.Error(got)
	}
}
