package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// childEnv makes the test binary run doctor for one namespace, by name, and print its
// Report. The process lacks the rights that the test removes.
const childEnv = "SPILLWAY_DOCTOR_CHILD"

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		if err := child(name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func child(name string) error {
	if os.Getenv("NO_NETFILTER_NETLINK") != "" {
		if err := refuseNetfilterNetlink(); err != nil {
			return err
		}
	}
	n, err := Load(context.Background(), Config{Namespaces: func() ([]conntrack.Namespace, error) {
		list, err := conntrack.Namespaces()
		if errors.Is(err, os.ErrPermission) {
			err = nil // other processes of this machine
		}
		return slices.DeleteFunc(list, func(n conntrack.Namespace) bool { return !n.Is(name) }), err
	}})
	if err != nil {
		return err
	}
	r := NewReport(n, Examine(n))
	r.Fixed = ApplyFixes(context.Background(), r.Findings)
	return json.NewEncoder(os.Stdout).Encode(r)
}

// refuseNetfilterNetlink makes the kernel answer this process as a kernel without
// nfnetlink would.
func refuseNetfilterNetlink() error {
	const protocolArg = 16 + 2*8 // offset of the third argument in struct seccomp_data, little-endian
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SOCKET, Jf: 5},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 16},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.AF_NETLINK, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: protocolArg},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.NETLINK_NETFILTER, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// All threads, since goroutines move. Root needs no NO_NEW_PRIVS for it.
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("install seccomp filter: %w", errno)
	}
	return nil
}

// asChild runs doctor for a namespace in a process of its own, behind a command that
// changes the process's environment.
func asChild(t *testing.T, ns conntrack.Namespace, env []string, setup string) Report {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	if setup != "" {
		cmd = exec.Command("unshare", "-m", "bash", "-ec", setup+"\nexec "+exe)
	}
	cmd.Env = append(append(os.Environ(), childEnv+"="+ns.String()), env...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	var r Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return r
}

// said fails unless the report names exactly these unreadable parts, each in one line.
func said(t *testing.T, r Report, want ...string) {
	t.Helper()
	ok := len(r.Problems) == len(want)
	for i := range min(len(want), len(r.Problems)) {
		ok = ok && strings.Contains(r.Problems[i].What, want[i]) && !strings.Contains(r.Problems[i].What, "\n")
	}
	if !ok {
		t.Errorf("problems %+v, want %q", r.Problems, want)
	}
}

func TestANamespaceThatMayNotBeEnteredIsSaid(t *testing.T) {
	ns := newNamespace(t, "locked")
	dir, err := os.MkdirTemp("", "doctor") // that no other user may enter
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	exe, _ := os.Executable()
	shell(t, "chmod 755 "+dir+" && cp "+exe+" "+dir+"/doctor")
	cmd := exec.Command(dir + "/doctor")
	cmd.Env = append(os.Environ(), childEnv+"="+ns.String())
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var r Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatal(err)
	}
	found := slices.ContainsFunc(r.Problems, func(p Problem) bool {
		return strings.Contains(p.What, "not permitted") && slices.Equal(p.Namespaces, []string{ns.String()})
	})
	if !found || r.Namespaces != 0 {
		t.Errorf("%+v", r)
	}
}

func TestANamespaceThatVanishesIsSaidAndTheRestLookedAt(t *testing.T) {
	gone, there := newNamespace(t, "gone"), newNamespace(t, "there")
	shell(t, "ip netns del "+gone.Names[0])
	n, err := Load(t.Context(), Config{Namespaces: func() ([]conntrack.Namespace, error) { return []conntrack.Namespace{gone, there}, nil }})
	if err != nil || len(n.Namespaces) != 1 || len(n.Problems) != 1 {
		t.Fatalf("%+v: %v", n, err)
	}
	if p := n.Problems[0]; !strings.Contains(p.What, "vanished") || p.Namespaces[0] != gone.String() {
		t.Errorf("%+v", p)
	}
}

func TestWithoutConntrackOverNetlinkTheRestIsLookedAt(t *testing.T) {
	ns := newNamespace(t, "nonetlink")
	inside(t, ns, "iptables-legacy -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE")
	r := asChild(t, ns, []string{"NO_NETFILTER_NETLINK=1"}, "")
	said(t, r, "no conntrack over netlink")
	onlyFinding(t, r.Findings, "masquerade-not-random")
}

func TestMissingProgramsAreSaidAndTheRestIsLookedAt(t *testing.T) {
	ns := newNamespace(t, "noprogram")
	inside(t, ns, `iptables-legacy -t nat -A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE; iptables-nft -A FORWARD -j ACCEPT
ip link add cni0 type bridge; for i in 1 2; do ip link add v$i type veth peer name p$i; ip link set v$i master cni0; done
sysctl -w net.bridge.bridge-nf-call-iptables=1`)
	send(t, ns, "127.0.0.1:9")
	r := asChild(t, ns, []string{"PATH=/nowhere"}, "")
	said(t, r, "rules of legacy iptables were not read: iptables-legacy-save is not installed",
		"rules of nftables were not read: nft is not installed")
	onlyFinding(t, r.Findings, "bridge-netfilter-on")
	// Without iptables nft still lists the rules of its variant.
	nft, _ := exec.LookPath("nft")
	only := t.TempDir()
	shell(t, "ln -s "+nft+" "+only+"/nft")
	r = asChild(t, ns, []string{"PATH=" + only}, "")
	said(t, r, "rules of legacy iptables were not read")
}

func TestFixesThatAreRefusedAreSaidAndTheOthersGoOn(t *testing.T) {
	ns := newNamespace(t, "readonly")
	inside(t, ns, outward+`
nft 'add table ip p; add chain ip p o { type nat hook output priority -100; }; add rule ip p o udp dport 53 dnat to 10.244.0.2'`)
	send(t, ns, "10.96.0.10:53")
	inside(t, ns, "nft 'flush chain ip p o; add rule ip p o udp dport 53 dnat to 10.244.0.3'")
	netnstest.Within(t, ns.Names[0], func() { sendNothing(t) })
	r := asChild(t, ns, nil, "mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys")
	said(t, r)
	if len(r.Fixed) != 2 {
		t.Fatalf("%+v", r.Fixed)
	}
	for _, f := range r.Fixed {
		switch f.ID {
		case "tcp-not-liberal":
			if f.Done || !strings.Contains(f.Error, "read only") || strings.Contains(f.Error, "\n") {
				t.Errorf("%+v", f)
			}
		case "stale-udp-entries":
			if !f.Done || f.Note != "1 deleted" {
				t.Errorf("%+v", f)
			}
		}
	}
}

// A setting that only the machine's namespace may write is reported likewise.
func TestASharedLimitIsNotSetFromAnotherNamespace(t *testing.T) {
	ns := newNamespace(t, "foreign")
	netnstest.Within(t, ns.Names[0], func() {
		_, err := raiseShared(conntrackMax, 1<<30).do(t.Context())
		if err == nil || !strings.Contains(err.Error(), "run the command on the node") {
			t.Errorf("got %v", err)
		}
	})
}

func TestNothingToLookAtIsAnError(t *testing.T) {
	if _, err := Load(t.Context(), Config{}); err == nil {
		t.Error("no error without a finder")
	}
	refused := errors.New("refused")
	if _, err := Load(t.Context(), Config{Namespaces: func() ([]conntrack.Namespace, error) { return nil, refused }}); !errors.Is(err,
		refused) {
		t.Errorf("got %v", err)
	}
}
