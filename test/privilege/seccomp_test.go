package privilege

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
)

// profile is an OCI seccomp profile, as the kubelet's Localhost profiles are.
type profile struct {
	DefaultAction   string           `json:"defaultAction"`
	DefaultErrnoRet *uint            `json:"defaultErrnoRet,omitempty"`
	Architectures   []string         `json:"architectures,omitempty"`
	Syscalls        []profileSyscall `json:"syscalls"`
}

type profileSyscall struct {
	Names    []string     `json:"names"`
	Action   string       `json:"action"`
	ErrnoRet *uint        `json:"errnoRet,omitempty"`
	Args     []profileArg `json:"args,omitempty"`
	Comment  string       `json:"comment,omitempty"`
}

type profileArg struct {
	Index    uint32 `json:"index"`
	Value    uint64 `json:"value"`
	ValueTwo uint64 `json:"valueTwo"`
	Op       string `json:"op"`
}

func readProfile(file string) (p profile, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(text, &p); err != nil {
		return p, fmt.Errorf("read seccomp profile %s: %w", file, err)
	}
	return p, nil
}

// loadProfile loads a profile into the calling thread.
func loadProfile(file string) error {
	p, err := readProfile(file)
	if err != nil {
		return err
	}
	policy, err := p.policy()
	if err != nil {
		return fmt.Errorf("read seccomp profile %s: %w", file, err)
	}
	return seccomp.LoadFilter(seccomp.Filter{NoNewPrivs: true, Policy: policy})
}

var (
	actions = map[string]seccomp.Action{
		"SCMP_ACT_ALLOW": seccomp.ActionAllow, "SCMP_ACT_ERRNO": seccomp.ActionErrno, "SCMP_ACT_LOG": seccomp.ActionLog,
	}
	operations = map[string]seccomp.Operation{
		"SCMP_CMP_EQ": seccomp.Equal, "SCMP_CMP_NE": seccomp.NotEqual, "SCMP_CMP_LT": seccomp.LessThan,
		"SCMP_CMP_LE": seccomp.LessOrEqual, "SCMP_CMP_GE": seccomp.GreaterOrEqual, "SCMP_CMP_GT": seccomp.GreaterThan,
	}
)

// policy leaves out system calls that this machine's architecture does not have, as
// container runtimes do.
func (p profile) policy() (seccomp.Policy, error) {
	info, err := arch.GetInfo("")
	if err != nil {
		return seccomp.Policy{}, err
	}
	policy := seccomp.Policy{DefaultAction: actions[p.DefaultAction]}
	for _, rule := range p.Syscalls {
		action, ok := actions[rule.Action]
		if !ok {
			return policy, fmt.Errorf("action %q is unknown to this test", rule.Action)
		}
		group := seccomp.SyscallGroup{Action: action}
		for _, name := range rule.Names {
			if _, known := info.SyscallNames[name]; !known {
				continue
			}
			if len(rule.Args) == 0 {
				group.Names = append(group.Names, name)
				continue
			}
			conditions, err := conditions(rule.Args)
			if err != nil {
				return policy, fmt.Errorf("%s: %w", name, err)
			}
			group.NamesWithCondtions = append(group.NamesWithCondtions, seccomp.NameWithConditions{Name: name, Conditions: conditions})
		}
		if len(group.Names)+len(group.NamesWithCondtions) > 0 {
			policy.Syscalls = append(policy.Syscalls, group)
		}
	}
	return policy, nil
}

func conditions(args []profileArg) (list seccomp.ArgumentConditions, err error) {
	for _, a := range args {
		c := seccomp.Condition{Argument: a.Index, Operation: operations[a.Op], Value: a.Value}
		if a.Op == "SCMP_CMP_MASKED_EQ" && a.ValueTwo == 0 {
			c.Operation = seccomp.BitsNotSet
		}
		if c.Operation == "" {
			return nil, fmt.Errorf("comparison %q is unknown to this test", a.Op)
		}
		list = append(list, c)
	}
	return list, nil
}

// ownProfile is the profile for the kubelet's seccomp directory.
const ownProfile = "../../deploy/seccomp/spillway.json"

// runtimeDefault is the profile that containerd makes for the capabilities of a
// container: DefaultProfile of its package contrib/seccomp, version 2.0.5.
func runtimeDefault(t *testing.T, list []string) string {
	t.Helper()
	name := "netfilter"
	switch {
	case slices.Contains(list, "SYS_ADMIN"):
		name = "sysadmin"
	case slices.Contains(list, "BPF") && slices.Contains(list, "PERFMON"):
		name = "perfmon"
	case slices.Contains(list, "BPF"):
		name = "bpf"
	}
	return absolute(t, "testdata/containerd-"+name+".json")
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestTheAgentRunsBelowItsOwnProfile goes through everything that an agent does.
func TestTheAgentRunsBelowItsOwnProfile(t *testing.T) {
	t.Parallel()
	for _, m := range oneMode() {
		t.Run(m.String(), func(t *testing.T) {
			c := confinement{Capabilities: granted(t, m.name), Seccomp: absolute(t, ownProfile)}
			for use, err := range try(t, m, c) {
				t.Errorf("%s: %v", use, err)
			}
		})
	}
}

// TestTheOwnProfileIsBounded looks for system calls that the agent has no use for and
// an attacker has, and sees one of them denied.
func TestTheOwnProfileIsBounded(t *testing.T) {
	p, err := readProfile(ownProfile)
	if err != nil {
		t.Fatal(err)
	}
	if p.DefaultAction != "SCMP_ACT_ERRNO" {
		t.Errorf("the default action is %s", p.DefaultAction)
	}
	allowed := map[string]bool{}
	for _, rule := range p.Syscalls {
		for _, name := range rule.Names {
			allowed[name] = true
		}
	}
	if len(allowed) > 150 {
		t.Errorf("%d system calls are allowed", len(allowed))
	}
	for _, name := range []string{
		"mount", "umount2", "move_mount", "open_tree", "fsopen", "pivot_root", "chroot", "unshare", "ptrace",
		"process_vm_readv", "process_vm_writev",
		"pidfd_getfd", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon",
		"add_key", "keyctl", "request_key", "userfaultfd", "io_uring_setup", "io_uring_enter", "open_by_handle_at", "name_to_handle_at",
		"setuid", "setgid", "setresuid", "setgroups", "chown", "fchownat", "mknod", "mknodat", "iopl", "ioperm", "personality", "acct",
		"settimeofday", "clock_settime",
	} {
		if allowed[name] {
			t.Errorf("%s is allowed", name)
		}
	}
	w := newWrapper(t, "/usr/bin/unshare")
	w.confine(confinement{Seccomp: absolute(t, ownProfile)})
	out, err := exec.Command(w.path, "--mount", "true").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "Operation not permitted") {
		t.Errorf("unshare below the profile: %v: %s", err, out)
	}
}
