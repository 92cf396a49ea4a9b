package doctor

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/node/kernel"
)

// TestAProgramInFrontIsFound attaches a program before and behind a program with
// Spillway's name.
func TestAProgramInFrontIsFound(t *testing.T) {
	const id = "tcx-program-in-front"
	if !kernel.HaveTCX() {
		t.Skip("needs tcx (Linux 6.6): is about its order")
	}
	ns := newNamespace(t, "hooks")
	inside(t, ns, "ip link add eth0 type veth peer name peer0 && ip link set eth0 up")
	own := hookProgram(t, ns, "from_network", link.Head())
	defer own.Close()
	expectNone(t, id, ns)
	behind := hookProgram(t, ns, "policy", link.Tail())
	defer behind.Close()
	expectNone(t, id, ns)
	front := hookProgram(t, ns, "mirror", link.Head())
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, id)
	if len(f.Evidence) != 1 || !strings.Contains(f.Evidence[0], "eth0 ingress: mirror, then from_network, then policy") ||
		f.Numbers["programs_in_front"] != 1 {
		t.Errorf("evidence %q, numbers %v", f.Evidence, f.Numbers)
	}
	if err := front.Close(); err != nil {
		t.Fatal(err)
	}
	expectNone(t, id, ns)
}

// hookProgram attaches a program to eth0.
func hookProgram(t *testing.T, ns interface{ Enter(func() error) error }, name string, anchor link.Anchor) (l link.Link) {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	err = ns.Enter(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		l, err = link.AttachTCX(link.TCXOptions{Interface: eth0.Attrs().Index, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: anchor})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}
