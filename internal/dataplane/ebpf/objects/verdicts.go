package objects

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// SumVerdicts returns the counters of verdicts, summed over all CPUs, by name.
func SumVerdicts(m *ebpf.Map, names []string) map[string]uint64 {
	out := make(map[string]uint64, len(names))
	var perCPU []uint64
	for i, name := range names {
		if err := m.Lookup(uint32(i), &perCPU); err != nil {
			continue
		}
		for _, n := range perCPU {
			out[name] += n
		}
	}
	return out
}

// VerdictNames reads the names of enum verdict from the object's BTF.
func VerdictNames(spec *ebpf.CollectionSpec) ([]string, error) {
	var e *btf.Enum
	if err := spec.Types.TypeByName("verdict", &e); err != nil {
		return nil, fmt.Errorf("read verdicts from BTF: %w", err)
	}
	names := make([]string, len(e.Values)-1)
	for i := range names {
		names[i] = strings.ToLower(e.Values[i].Name)
	}
	return names, nil
}
