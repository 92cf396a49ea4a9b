package inspect

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// PinnedVerdicts returns the Verdicts of the instance pinned in a directory, even if
// its agent does not run. The error is os.ErrNotExist if there is none.
func PinnedVerdicts(bpffs string) (map[string]uint64, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(bpffs), objects.TCMapVerdicts), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open counters in %s: %w", bpffs, err)
	}
	defer m.Close()
	spec, err := objects.LoadTC()
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects: %w", err)
	}
	names, err := objects.VerdictNames(spec)
	if err != nil {
		return nil, err
	}
	return objects.SumVerdicts(m, names), nil
}

// VerdictOf returns what a verdict means; false: it is unknown.
func VerdictOf(name string) (objects.Verdict, bool) { return objects.VerdictOf(name) }
