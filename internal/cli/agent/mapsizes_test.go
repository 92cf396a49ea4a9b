package agent

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
)

func TestMapsFitIntoMemory(t *testing.T) {
	const file = "/sys/fs/cgroup/memory.max"
	few := fmt.Sprintf("%d on %d cores", 1<<20, runtime.NumCPU())
	for _, row := range []struct {
		name           string
		args           []string
		machine, limit uint64 // MiB
		most           uint64 // of the maps, MiB
		flows          uint32 // 0: not compared
		err            []string
	}{
		{"a large machine", nil, 64 << 10, 0, 600, 0, nil},
		{"a machine of 4 GiB fits the request of the chart", nil, 4 << 10, 0, 64, 0, nil},
		{"a limit of the chart's request", nil, 64 << 10, 128, 64, 0, nil},
		{"a limit that leaves less than half", nil, 64 << 10, 110, 46, 0, nil},
		{"a limit above the machine's memory", nil, 4 << 10, 64 << 10, 64, 0, nil},
		{"a flag that fits", []string{"--conntrack-min=200000", "--conntrack-max-per-core=1"}, 64 << 10, 512, 300, 200000, nil},
		{"a small table", []string{"--conntrack-min=5000", "--conntrack-max-per-core=1"}, 64 << 10, 128, 64, 5000, nil},
		{"no table is requested", []string{"--conntrack-max-per-core=0"}, 64 << 10, 128, 64, 0, nil},
		{"a flag that does not fit", []string{"--conntrack-min=1000000"}, 64 << 10, 512, 0, 0,
			[]string{"--conntrack-min 1000000: a table of 1000000 flows", "need 6", "the memory limit is 512 MiB (" + file + ")",
				"give a smaller value"}},
		{"a flag for each core", []string{"--conntrack-max-per-core=1048576"}, 64 << 10, 512, 0, 0,
			[]string{"--conntrack-max-per-core " + few, "the memory limit is 512 MiB (" + file + ")"}},
		{"a flag that the machine has no memory for", []string{"--conntrack-min=1000000"}, 512, 0, 0, 0,
			[]string{"--conntrack-min 1000000: ", "this machine has 512 MiB: give a smaller value"}},
		{"a limit below all", nil, 64 << 10, 64, 0, 0,
			[]string{"need 107 MiB", "the memory limit is 64 MiB (" + file + "): raise the limit", "--conntrack-min below 16384"}},
		{"another dataplane has no maps", []string{"--proxy-mode=nftables", "--conntrack-min=1000000"}, 64 << 10, 64, 0, 0, nil},
		{"removing needs none", []string{"--cleanup", "--conntrack-min=1000000"}, 64 << 10, 64, 0, 0, nil},
	} {
		var c Config
		f := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		c.AddFlags(f)
		if err := errors.Join(f.Parse(row.args), c.readConfig(f)); err != nil {
			t.Fatal(err)
		}
		err := c.fitMaps(availableMemory{row.machine << 20, row.limit << 20, file})
		if row.err == nil && err != nil || row.err != nil && !errors.As(err, new(*cli.UsageError)) {
			t.Errorf("%s: error %v", row.name, err)
		}
		for _, part := range row.err {
			if !strings.Contains(fmt.Sprint(err), part) {
				t.Errorf("%s: error %v, want %q", row.name, err, part)
			}
		}
		if row.err == nil && c.mapMemory > row.most<<20 || row.flows > 0 && c.EBPF.FlowTableSize != row.flows {
			t.Errorf("%s: %d flows, maps of %d MiB; want %d and %d at most", row.name, c.EBPF.FlowTableSize, c.mapMemory>>20, row.flows, row.most)
		}
		if p := c.Dataplanes(nil); p.EBPF.FlowTableSize != c.EBPF.FlowTableSize || row.most > 0 &&
			c.intent().Capacity.Endpoints != int(c.EBPF.MaxEndpoints) {
			t.Errorf("%s: the dataplane gets %d flows, and intent a capacity of %+v: want %+v", row.name, p.EBPF.FlowTableSize,
				c.intent().Capacity, c.EBPF)
		}
	}
}
