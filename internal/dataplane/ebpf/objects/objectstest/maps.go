// Package objectstest has what tests of several parts of the eBPF dataplane need: maps without programs,
// their contents, Service ports and flows.
package objectstest

import (
	"log/slog"
	"maps"
	"os"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// Objects makes all maps and no program, of a test's own, and completes the configuration.
func Objects(tb testing.TB, cfg objects.Config) (*objects.Config, *objects.Objects) {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("needs root: makes eBPF maps")
	}
	cfg.BPFFS, cfg.CgroupRoot, cfg.Log = tb.TempDir(), "/", slog.New(slog.DiscardHandler)
	must.Do(tb, cfg.Validate())
	all, err := objects.Specs(&cfg, kernel.Features{})
	must.Do(tb, err)
	tc := all[0]
	o := &objects.Objects{Maps: map[string]*ebpf.Map{}}
	o.Verdicts, err = objects.VerdictNames(tc)
	must.Do(tb, err)
	tc.Maps[objects.IDsMap] = objects.IDsSpec()
	for name, spec := range tc.Maps {
		if spec.Pinning != ebpf.PinByName {
			continue
		}
		spec.Pinning = ebpf.PinNone
		o.Maps[name], err = ebpf.NewMap(spec)
		must.Do(tb, err)
	}
	tb.Cleanup(o.Close)
	o.Filter, err = objects.OpenFilter(o)
	must.Do(tb, err)
	return &cfg, o
}

// ReadAll returns the content of a map.
func ReadAll[K comparable, V any](tb testing.TB, m *ebpf.Map) map[K]V {
	tb.Helper()
	out := map[K]V{}
	must.Do(tb, objects.Each(m, func(k K, v V) { out[k] = v }))
	return out
}

// Settings returns the settings of all programs.
func Settings(tb testing.TB, o *objects.Objects) (s objects.TCSettings) {
	tb.Helper()
	must.Do(tb, o.Maps[objects.TCMapNodeSettings].Lookup(uint32(0), &s))
	return s
}

// WantSame fails unless two maps are equal.
func WantSame[K, V comparable](t *testing.T, what string, have, want map[K]V) {
	t.Helper()
	if !maps.Equal(have, want) {
		t.Errorf("%s: %v, want %v", what, have, want)
	}
}
