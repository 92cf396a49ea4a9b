package ebpf

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// stubPrograms has agents load programs that do nothing until the test ends. A stub has the name,
// type and maps of its program, so that a test of pins, maps, links and hooks sees no difference.
// The verifier takes most of the time of such a test otherwise.
//
// A test of what programs do, or of the verifier, must not use it.
func stubPrograms(t testing.TB) {
	t.Helper()
	t.Cleanup(stubSome(func(*ebpf.ProgramSpec) bool { return true }))
}

// stubSome does so with the programs that a test never runs, until restore is called.
func stubSome(unused func(*ebpf.ProgramSpec) bool) (restore func()) {
	was := objects.NewCollection
	objects.NewCollection = func(spec *ebpf.CollectionSpec, opts ebpf.CollectionOptions) (*ebpf.Collection, error) {
		spec = spec.Copy()
		for _, p := range spec.Programs {
			if result, known := stubResults[p.Type]; known && unused(p) {
				p.Instructions = stub(p, result)
			}
		}
		return was(spec, opts)
	}
	return func() { objects.NewCollection = was }
}

// stubResults has the results with which a program lets a packet or a call pass. Programs of other
// types are small.
var stubResults = map[ebpf.ProgramType]int32{
	ebpf.SchedCLS: actNext, ebpf.CGroupSockAddr: 1, ebpf.XDP: 2,
}

// stub returns instructions that refer to the maps of a program and do nothing else.
func stub(p *ebpf.ProgramSpec, result int32) asm.Instructions {
	var ins asm.Instructions
	seen := map[string]bool{}
	for _, i := range p.Instructions {
		if name := i.Reference(); i.IsLoadFromMap() && !seen[name] {
			seen[name] = true
			ins = append(ins, asm.LoadMapPtr(asm.R1, 0).WithReference(name))
		}
	}
	ins = append(ins, asm.Mov.Imm(asm.R0, result), asm.Return())
	ins[0] = ins[0].WithSymbol(p.Name)
	return ins
}
