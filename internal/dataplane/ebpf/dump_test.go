package ebpf

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Addresses and ports of a dump are those that people write, of every map.
func TestADumpIsDecoded(t *testing.T) {
	m := newPortMaps(t, 1<<10, 1<<10)
	writeAll(t, openPorts(t, m), manyPorts(3, 2))
	spec, err := loadTc()
	noError(t, err)
	names, err := PinnedMaps()
	noError(t, err)
	for name, want := range map[string]string{
		tcMapFrontends: "addr=10.96.0.1 port=80 proto=6 family=4 service=",
		tcMapBackends:  "port=8080 family=4 ",
		tcMapServices:  "count[0]=2 count[1]=",
		tcMapSlots:     "service=",
	} {
		if !slices.Contains(names, name) {
			t.Errorf("%s is not among %q", name, names)
		}
		var all strings.Builder
		noError(t, dump(m[name], spec.Maps[name], func(key, value []Field) error {
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
