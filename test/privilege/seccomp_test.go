package privilege

import (
	"encoding/json"
	"fmt"
	"os"

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
