package kernel

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// Place holds the paths that an instance uses.
type Place struct {
	BPFFS      string // directory for pins; call EnsureBPFFS before Probe
	CgroupRoot string // cgroup for socket hooks; empty: no socket hooks
}

// Features are the properties of the kernel and the machine that matter to the eBPF
// dataplane. Only the program sock_release needs BTF.
type Features struct {
	Kernel Version
	// Lacks names the capabilities that the process needs and does not have.
	Lacks   []string
	Place   Place
	BPFFS   bool // Place.BPFFS is inside a BPF file system
	Cgroup2 bool // Place.CgroupRoot is inside a cgroup2, or none is configured

	// Required by the dataplane: the error of the probe, nil if present.
	Needed map[string]error

	// Optional.
	TCX             bool // programs by tcx links (6.6), else clsact
	SetRetval       bool // bpf_set_retval in connect and sendmsg hooks (5.18)
	CsumReplaceIPv6 bool // BPF_F_IPV6 of bpf_l4_csum_replace (6.16, and stable kernels)
	ConntrackLookup bool // bpf_skb_ct_lookup (5.18), of a module that is loaded: see LoadConntrack
	XDPFrags        bool // XDP programs take frames of several buffers (5.18)
	BTF             bool // the kernel has BTF: nicer dumps, and events of UDP sockets
	SocketIterators bool // iterators of sockets load
}

// helper is a BPF helper that the dataplane requires.
type helper struct {
	name string
	typ  ebpf.ProgramType
	fn   asm.BuiltinFunc
}

var neededHelpers = []helper{
	{"bpf_redirect_peer", ebpf.SchedCLS, asm.FnRedirectPeer},
	{"bpf_redirect_neigh", ebpf.SchedCLS, asm.FnRedirectNeigh},
	{"bpf_fib_lookup", ebpf.SchedCLS, asm.FnFibLookup},
	{"bpf_skb_change_tail", ebpf.SchedCLS, asm.FnSkbChangeTail},
	{"bpf_skb_change_type", ebpf.SchedCLS, asm.FnSkbChangeType},
	{"bpf_csum_diff", ebpf.SchedCLS, asm.FnCsumDiff},
	{"bpf_l4_csum_replace", ebpf.SchedCLS, asm.FnL4CsumReplace},
	{"bpf_sk_lookup_udp", ebpf.SchedCLS, asm.FnSkLookupUdp},
	{"bpf_skc_lookup_tcp", ebpf.SchedCLS, asm.FnSkcLookupTcp},
	{"bpf_ktime_get_coarse_ns", ebpf.SchedCLS, asm.FnKtimeGetCoarseNs},
	{"bpf_get_netns_cookie", ebpf.CGroupSockAddr, asm.FnGetNetnsCookie},
	{"bpf_get_socket_cookie", ebpf.CGroupSockAddr, asm.FnGetSocketCookie},
}

var neededMaps = []struct {
	name string
	typ  ebpf.MapType
}{
	{"LRU hash maps", ebpf.LRUHash},
	{"LPM tries", ebpf.LPMTrie},
	{"per-CPU arrays", ebpf.PerCPUArray},
}

// Probe detects the features and changes nothing. It returns an error if a probe itself
// fails; a missing feature is no error.
func Probe(place Place) (Features, error) {
	f := Features{Place: place}
	var err error
	if f.Kernel, err = RunningVersion(); err != nil {
		return f, err
	}
	if f.Lacks, err = lacks(); err != nil {
		return f, err
	}
	if f.BPFFS, err = OnBPFFS(place.BPFFS); err != nil {
		return f, err
	}
	f.Cgroup2 = true
	if place.CgroupRoot != "" {
		if f.Cgroup2, err = onCgroup2(place.CgroupRoot); err != nil {
			return f, err
		}
	}
	if len(f.Lacks) == 0 && !f.Kernel.Less(Floor) {
		f.probePrograms()
	}
	return f, nil
}

func (f *Features) probePrograms() {
	f.Needed = make(map[string]error)
	for _, h := range neededHelpers {
		f.Needed[h.name] = features.HaveProgramHelper(h.typ, h.fn)
	}
	for _, m := range neededMaps {
		f.Needed[m.name] = features.HaveMapType(m.typ)
	}
	f.Needed["bounded loops"] = features.HaveBoundedLoops()
	f.TCX = HaveTCX()
	f.SetRetval = features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) == nil
	f.CsumReplaceIPv6 = haveCsumReplaceIPv6() == nil
	f.ConntrackLookup = haveConntrackLookup()
	f.XDPFrags = haveXDPFrags()
	f.BTF = unix.Access("/sys/kernel/btf/vmlinux", unix.R_OK) == nil
	f.SocketIterators = ProbeSocketIterators() == nil
}

// missing lists the missing requirements of the eBPF dataplane, each with its remedy.
func (f *Features) missing() []string {
	const instead = "use --proxy-mode nftables"
	if f.Kernel.Less(Floor) {
		return []string{fmt.Sprintf("eBPF dataplane needs Linux %d.%d or newer, this is %s: %s",
			Floor.Major, Floor.Minor, f.Kernel, instead)}
	}
	if len(f.Lacks) > 0 {
		return []string{fmt.Sprintf("eBPF dataplane needs %s, which this process lacks: run as root, or add to the container's capabilities",
			strings.Join(f.Lacks, ", "))}
	}
	var missing []string
	var helpers []string
	for _, name := range slices.Sorted(maps.Keys(f.Needed)) {
		err := f.Needed[name]
		if errors.Is(err, unix.EPERM) {
			return []string{"eBPF dataplane needs bpf(2), which a seccomp profile or a security module denies: allow it, " +
				"in the chart with another seccompProfile, or with sysAdmin: true"}
		}
		if errors.Is(err, ebpf.ErrNotSupported) {
			helpers = append(helpers, name)
		} else if err != nil {
			helpers = append(helpers, fmt.Sprintf("%s (%v)", name, err))
		}
	}
	if len(helpers) > 0 {
		missing = append(missing, fmt.Sprintf("eBPF dataplane needs %s, which Linux %s as built here lacks: %s",
			strings.Join(helpers, ", "), f.Kernel, instead))
	}
	if !f.BPFFS {
		missing = append(missing, fmt.Sprintf("eBPF dataplane needs a BPF file system at %s: mount -t bpf bpf %s, or give --bpffs",
			f.Place.BPFFS, f.Place.BPFFS))
	}
	if !f.Cgroup2 {
		missing = append(missing, fmt.Sprintf("eBPF dataplane needs a cgroup2 directory, %s is none: "+
			"give --cgroup-root, in the chart cgroupRoot, one that \"findmnt -t cgroup2\" shows on the node", f.Place.CgroupRoot))
	}
	return missing
}

// Err returns nil if no requirement is missing, otherwise an error of one line.
func (f *Features) Err() error {
	missing := f.missing()
	if len(missing) == 0 {
		return nil
	}
	return errors.New(strings.Join(missing, "; "))
}

// lacks compares the calling thread's effective capabilities with the needed ones.
// CAP_SYS_ADMIN includes those of eBPF.
func lacks() (names []string, err error) {
	_, data, err := capabilities()
	if err != nil {
		return nil, err
	}
	has := func(c int) bool { return data[c/32].Effective&(1<<(c%32)) != 0 }
	for _, need := range []struct {
		name       string
		capability int
		ofAdmin    bool
	}{
		{"CAP_BPF", unix.CAP_BPF, true},
		{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN, false},
		{"CAP_PERFMON", unix.CAP_PERFMON, true},
	} {
		if !has(need.capability) && !(need.ofAdmin && has(unix.CAP_SYS_ADMIN)) {
			names = append(names, need.name)
		}
	}
	return names, nil
}

// haveXDPFrags loads a program with the flag for frames of several buffers.
func haveXDPFrags() bool {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL", Flags: unix.BPF_F_XDP_HAS_FRAGS,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		return false
	}
	prog.Close()
	return true
}

// ProbeSocketIterators loads an iterator of the sockets with an entry in a map. It needs BTF. With
// EPERM, a security module refuses it: some do, although they let other programs load.
func ProbeSocketIterators() error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: "bpf_sk_storage_map", License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return fmt.Errorf("iterate sockets by eBPF: %w", err)
	}
	return prog.Close()
}

// haveCsumReplaceIPv6 runs a program that updates a checksum with the flag for IPv6. Older
// kernels return EINVAL for the flag, and only at run time.
func haveCsumReplaceIPv6() error {
	const (
		pseudoHdr = 1 << 4
		ipv6      = 1 << 7
	)
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R2, 16), // offset of the checksum
			asm.Mov.Imm(asm.R3, 0),  // from
			asm.Mov.Imm(asm.R4, 0),  // to: a difference of nothing
			asm.Mov.Imm(asm.R5, pseudoHdr|ipv6),
			asm.FnL4CsumReplace.Call(),
			asm.Return(),
		},
	})
	if err != nil {
		return err
	}
	defer prog.Close()
	packet := make([]byte, 64)
	packet[12], packet[13] = 0x86, 0xdd
	ret, err := prog.Run(&ebpf.RunOptions{Data: packet, DataOut: make([]byte, 64)})
	if err != nil {
		return err
	}
	if ret != 0 {
		return ebpf.ErrNotSupported
	}
	return nil
}
