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

// LoadConntrack makes the kernel load connection tracking if it is a module, as in
// Debian's kernels: eBPF programs can call functions only of loaded modules. A request
// for statistics loads it, even if the caller cannot see the module's file. This alone
// does not enable tracking: a rule must require it (since 4.10).
func LoadConntrack() error {
	const (
		subsystem = 1 // NFNL_SUBSYS_CTNETLINK
		getStats  = 5 // IPCTNL_MSG_CT_GET_STATS
	)
	// The only reply announces more messages (NLM_F_MULTI); the ACK ends it.
	req := nl.NewNetlinkRequest(subsystem<<8|getStats, unix.NLM_F_ACK)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	if _, err := req.Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		return fmt.Errorf("load connection tracking: %w", err)
	}
	return nil
}

// LoadHelper makes the kernel load a conntrack helper ("ftp", "tftp") and its NAT module,
// if they are modules. A rule that names the helper loads the former, but never the
// latter. LoadHelper ignores errors, such as a missing modprobe: the rule that needs the
// helper then fails.
func LoadHelper(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = exec.CommandContext(ctx, "modprobe", "-q", "-a", "nf_conntrack_"+name, "nf_nat_"+name).Run()
}

// haveConntrackLookup reports whether programs can look up a packet's connection
// (bpf_skb_ct_lookup, 5.18), in the kernel or in its loaded module. A function of a
// module needs a handle of the module's BTF, for which the kernel requires CAP_SYS_ADMIN
// (BPF_BTF_GET_FD_BY_ID).
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
