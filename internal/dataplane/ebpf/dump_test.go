package ebpf

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// Addresses and ports of a dump are those that people write, of every map.
func TestADumpIsDecoded(t *testing.T) {
	b := newMapsBackend(t, Config{})
	must.Do(t, b.Apply(t.Context(), intent.Changes{Upserts: objectstest.ManyPorts(3, 2)}))
	spec, err := objects.LoadTC()
	must.Do(t, err)
	names, err := inspect.PinnedMaps()
	must.Do(t, err)
	for name, want := range map[string]string{
		objects.TCMapFrontends: "addr=10.96.0.1 port=80 proto=6 family=4 service=",
		objects.TCMapBackends:  "port=8080 family=4 ",
		objects.TCMapServices:  "count[0]=2 count[1]=",
		objects.TCMapSlots:     "service=",
	} {
		if !slices.Contains(names, name) {
			t.Errorf("%s is not among %q", name, names)
		}
		var all strings.Builder
		must.Do(t, inspect.DumpMap(b.m(name), spec.Maps[name], func(key, value []inspect.Field) error {
			for _, f := range append(key, value...) {
				fmt.Fprintf(&all, "%s=%v ", f.Name, f.Value)
			}
			all.WriteString("\n")
			return nil
		}))
		if !strings.Contains(all.String(), want) {
			t.Errorf("%s lacks %q:\n%s", name, want, &all)
		}
	}
}
