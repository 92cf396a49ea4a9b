package ebpf

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// verifierLimits are limits of this project, about a fourth above the measured values.
// The kernel's own are 1,000,000 instructions and 512 bytes.
var verifierLimits = []verifierLimit{
	{"from_network", 2600, 128},
	{"to_network", 2500, 128},
	{"from_pod", 2400, 128},
	{"from_network_l3", 2600, 128},
	{"to_network_l3", 2500, 128},
	{"handle", 190000, 512},
	{"xdp_from_network", 9000, 416},
	{"connect4", 12400, 320},
	{"connect6", 21000, 352},
	{"sendmsg4", 11300, 352},
	{"sendmsg6", 19500, 384},
	{"recvmsg4", 400, 160},
	{"recvmsg6", 1500, 256},
	{"getpeername4", 100, 64},
	{"getpeername6", 300, 96},
	{"sock_ops", 2150, 128},
	{"sock_release", 270, 64},
	{"lost_handshakes", 350, 160},
	{"counted_sockets", 100, 64},
}

type verifierLimit struct {
	program      string
	instructions uint32
	stack        int // bytes, of the deepest chain of calls
}

// A program that grows takes the verifier longer at each start of an agent, and fails on
// a kernel whose verifier follows more paths.
//
// All events, counters and loads are on: without them the verifier removes their code.
func TestLoadLimits(t *testing.T) {
	cfg := ownPlace(t)
	cfg.FlowEvents, cfg.ServiceMetrics, cfg.BalanceByLoad, cfg.DSRKeys, cfg.DSRPort, cfg.XDP = EventsAll, true, true,
		[]DSRKey{{1}, {2}}, 6080, XDPAuto
	must.Do(t, kernel.LoadConntrack())
	features, err := kernel.Probe(kernel.Place{BPFFS: cfg.BPFFS, CgroupRoot: cfg.CgroupRoot})
	must.Do(t, err)
	all, err := objects.Specs(&cfg, features)
	must.Do(t, err)
	for _, spec := range all {
		for _, m := range spec.Maps {
			m.Pinning = ebpf.PinNone
		}
		coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
			Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
		})
		must.Do(t, err)
		defer coll.Close()
		for name, p := range coll.Programs {
			i := slices.IndexFunc(verifierLimits, func(l verifierLimit) bool { return l.program == name })
			if i < 0 {
				t.Errorf("%s has no limit", name)
				continue
			}
			limit := verifierLimits[i]
			stack := stackDepth(t, spec.Programs[name], p.VerifierLog)
			info, err := p.Info()
			must.Do(t, err)
			instructions, known := info.VerifiedInstructions()
			t.Logf("%s: %d instructions, %d bytes of stack", name, instructions, stack)
			if !known && !features.Kernel.Less(kernel.Version{Major: 5, Minor: 16}) {
				t.Errorf("%s: the kernel does not report instructions", name)
			}
			if instructions > limit.instructions {
				t.Errorf("%s: the verifier processed %d instructions, the limit is %d", name, instructions, limit.instructions)
			}
			if stack > limit.stack {
				t.Errorf("%s: %d bytes of stack, the limit is %d", name, stack, limit.stack)
			}
		}
	}
}

var (
	stackLine    = regexp.MustCompile(`(?m)^stack depth ([0-9]+(\+[0-9]+)*)`)
	functionLine = regexp.MustCompile(`(?m)^subprog [0-9]+ \((\w+)\) .* stack ([0-9]+)$`) // Linux 7.3
)

// stackDepth returns the bytes of stack that the deepest chain of calls of a program
// uses, as check_max_stack_depth of Linux 6.1 counts them. The log has the bytes of each
// function: before Linux 7.3 without names, in the order of the instructions.
func stackDepth(t *testing.T, spec *ebpf.ProgramSpec, log string) int {
	t.Helper()
	var names []string
	calls := map[string][]string{}
	for _, ins := range spec.Instructions {
		if btf.FuncMetadata(&ins) != nil {
			names = append(names, ins.Symbol())
		}
		if ins.IsFunctionCall() || ins.IsFunctionReference() {
			caller := names[len(names)-1]
			calls[caller] = append(calls[caller], ins.Reference())
		}
	}
	frames := map[string]int{}
	frame := func(name, text string) {
		bytes, err := strconv.Atoi(text)
		must.Do(t, err)
		frames[name] = (max(bytes, 1) + 31) / 32 * 32
	}
	for _, f := range functionLine.FindAllStringSubmatch(log, -1) {
		frame(f[1], f[2])
	}
	if line := stackLine.FindStringSubmatch(log); line != nil {
		for i, text := range strings.Split(line[1], "+") {
			frame(names[min(i, len(names)-1)], text)
		}
	}
	for _, name := range names {
		if frames[name] == 0 {
			t.Fatalf("%s: no stack depth of %s in the verifier's log: %s", spec.Name, name, log)
		}
	}
	var depth func(string) int
	depth = func(name string) int {
		deepest := 0
		for _, callee := range calls[name] {
			deepest = max(deepest, depth(callee))
		}
		return frames[name] + deepest
	}
	return depth(names[0])
}

// The page has a row for each program.
func TestLimitsAreDocumented(t *testing.T) {
	const page = "../../../docs/reference/ebpf-maps.md"
	text, err := os.ReadFile(page)
	must.Do(t, err)
	var want []string
	for _, l := range verifierLimits {
		want = append(want, fmt.Sprintf("| `%s` | %d | %d |", l.program, l.instructions, l.stack))
	}
	_, section, _ := strings.Cut(string(text), "\n## Limits of the programs\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var have []string
	for line := range strings.Lines(section) {
		if strings.HasPrefix(line, "| `") {
			have = append(have, strings.TrimSpace(line))
		}
	}
	if !slices.Equal(have, want) {
		t.Errorf("%s has %q, want these rows:\n%s", page, have, strings.Join(want, "\n"))
	}
}

// TestEntryProgramsWriteNothing: the kernel adds a prologue to a program that stores into packets. It
// begins by reading whether the packet is a clone (bpf_unclone_prologue of net/core/filter.c).
func TestEntryProgramsWriteNothing(t *testing.T) {
	cfg := ownPlace(t)
	all, err := objects.Specs(&cfg, kernel.Features{})
	must.Do(t, err)
	for _, m := range all[0].Maps {
		m.Pinning = ebpf.PinNone
	}
	coll, err := ebpf.NewCollection(all[0])
	must.Do(t, err)
	defer coll.Close()
	for name, p := range coll.Programs {
		info, err := p.Info()
		must.Do(t, err)
		code, err := info.Instructions()
		if errors.Is(err, ebpf.ErrRestrictedKernel) {
			t.Skip(err)
		}
		must.Do(t, err)
		first := code[0]
		prologue := first.OpCode == asm.LoadMemOp(asm.Byte) && first.Dst == asm.R6 && first.Src == asm.R1
		if prologue != (name == objects.TCProgHandle) {
			t.Errorf("%s begins with %v: has a prologue %v", name, first, prologue)
		}
	}
}
