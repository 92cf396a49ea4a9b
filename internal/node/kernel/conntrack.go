package kernel

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	"github.com/cilium/ebpf/btf"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// LoadConntrack has the kernel load its connection tracking where that is a
// module, as in Debian's kernels: programs can call functions only of modules
// that are there when they are loaded. The kernel loads it by itself when it is
// asked for statistics, also where the caller sees no module's file. Nothing is
// tracked by that alone: it takes a rule that wants it (since 4.10).
func LoadConntrack() error {
	const (
		subsystem = 1 // NFNL_SUBSYS_CTNETLINK
		getStats  = 5 // IPCTNL_MSG_CT_GET_STATS
	)
	// The answer says that more will come (NLM_F_MULTI), and none does: hence ACK.
	req := nl.NewNetlinkRequest(subsystem<<8|getStats, unix.NLM_F_ACK)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	if _, err := req.Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		return fmt.Errorf("load connection tracking: %w", err)
	}
	return nil
}

// LoadHelper has the kernel load one of its conntrack helpers ("ftp", "tftp") and
// that helper's part of NAT where they are modules. The kernel loads the former by
// itself when a rule names it, but never the latter. Where there is no modprobe, or
// no right to use it, nothing happens: who needs the helper finds out.
func LoadHelper(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = exec.CommandContext(ctx, "modprobe", "-q", "-a", "nf_conntrack_"+name, "nf_nat_"+name).Run()
}

// haveConntrackLookup reports whether programs can ask for a packet's connection
// (bpf_skb_ct_lookup, 5.18), from the kernel itself or from its loaded module. A
// function of a module takes a handle of the module's types, which the kernel gives
// only with CAP_SYS_ADMIN (BPF_BTF_GET_FD_BY_ID).
func haveConntrackLookup() bool {
	spec, err := btf.LoadKernelModuleSpec("nf_conntrack")
	if err == nil {
		admin, err := HaveCapability(unix.CAP_SYS_ADMIN)
		return err == nil && admin && hasLookup(spec)
	}
	if spec, err = btf.LoadKernelSpec(); err != nil {
		return false
	}
	return hasLookup(spec)
}

func hasLookup(spec *btf.Spec) bool {
	var fn *btf.Func
	return spec.TypeByName("bpf_skb_ct_lookup", &fn) == nil
}
