package doctor

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// attachNamed attaches a program of this name to d0, by a tcx link or as a filter.
func attachNamed(t *testing.T, name string, tcx bool) {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	d0, err := netlink.LinkByName("d0")
	if err != nil {
		t.Fatal(err)
	}
	if tcx {
		l, err := link.AttachTCX(link.TCXOptions{Interface: d0.Attrs().Index, Program: prog, Attach: ebpf.AttachTCXIngress})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return
	}
	attrs := netlink.QdiscAttrs{LinkIndex: d0.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
	if err := netlink.QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: attrs, QdiscType: "clsact"}); err != nil {
		t.Fatal(err)
	}
	err = netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: d0.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1,
			Protocol: unix.ETH_P_ALL},
		Fd: prog.FD(), Name: name, DirectAction: true,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestIPsecPoliciesBesideTheEBPFDataplaneAreFound(t *testing.T) {
	const policy = "ip xfrm policy add src 10.1.0.0/16 dst 10.2.0.0/16 dir out action block"
	for _, row := range []struct {
		role, program string
		tcx           bool
	}{{"ipsec-tcx", "from_network", true}, {"ipsec-pod", "from_pod", true}, {"ipsec-clsact", "spillway", false}} {
		ns := newNamespace(t, row.role)
		inside(t, ns, outward+policy)
		expectNone(t, "ipsec-with-ebpf", ns) // the dataplane does not run
		netnstest.Within(t, ns.Names[0], func() { attachNamed(t, "cil_from_netdev", true) })
		expectNone(t, "ipsec-with-ebpf", ns)
		netnstest.Within(t, ns.Names[0], func() { attachNamed(t, row.program, row.tcx) })
		_, findings := examine(t, ns)
		f := onlyFinding(t, findings, "ipsec-with-ebpf")
		if f.Severity != Warning || f.Numbers["policies"] != 1 || !slices.Contains(f.Evidence, "policy out: from 10.1.0.0/16 to 10.2.0.0/16") {
			t.Errorf("%s: %+v", row.role, f)
		}
		inside(t, ns, "ip xfrm policy flush")
		expectNone(t, "ipsec-with-ebpf", ns)
	}
}
