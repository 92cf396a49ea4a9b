package objects

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// newMaps creates the maps of a configuration without pins.
func newMaps(cfg *Config) (*ebpf.Collection, error) {
	tc, err := LoadTC()
	if err != nil {
		return nil, err
	}
	setSizes(tc, cfg)
	for _, m := range tc.Maps {
		m.Pinning = ebpf.PinNone
	}
	clear(tc.Programs)
	tc.Maps[TCMapTailCalls].Contents = nil
	tc.Variables = nil
	maps.DeleteFunc(tc.Maps, func(name string, _ *ebpf.MapSpec) bool { return strings.HasPrefix(name, ".") })
	return ebpf.NewCollection(tc)
}

// The kernel reports the memory of a map since Linux 6.4 (map_mem_usage).
func TestMemoryOfMaps(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes eBPF maps")
	}
	if version, err := kernel.RunningVersion(); err != nil || version.Less(kernel.Version{Major: 6, Minor: 4}) {
		t.Skip("the kernel estimates the memory of maps before Linux 6.4")
	}
	for name, cfg := range map[string]Config{
		"small":  {FlowTableSize: 5000, MaxFrontends: 3000, MaxEndpoints: 6000},
		"powers": {FlowTableSize: 1 << 14, MaxFrontends: 1 << 12, MaxEndpoints: 1 << 13},
		"features": {FlowTableSize: 5000, MaxFrontends: 3000, MaxEndpoints: 6000, XDP: XDPAuto, FlowEvents: EventsAll, BalanceByLoad: true,
			DSRKeys: []DSRKey{{1}}},
	} {
		all, err := newMaps(&cfg)
		must.Do(t, err)
		var have uint64
		for _, m := range all.Maps {
			info, err := m.Info()
			must.Do(t, err)
			bytes, _ := info.Memlock() // none for tries without entries
			have += bytes
		}
		all.Close()
		want, err := cfg.Memory()
		must.Do(t, err)
		if slack := uint64(128 << 10); want > have || have-want > slack {
			t.Errorf("%s: the maps take %d bytes, Memory says %d", name, have, want)
		}
	}
}

func TestFitChoosesSizes(t *testing.T) {
	const rule = 131072 // kube-proxy's, up to four cores
	for _, row := range []struct {
		name      string
		mib       uint64
		cfg       Config
		flows     uint32
		endpoints uint32
		least     uint32 // flows
		whole     bool   // all flows that the rule says
	}{
		{"1 GiB of memory", 16, Config{}, rule, 1 << 16, minFittedFlows, false},
		{"4 GiB, or a limit of 128 MiB", 64, Config{}, rule, 1 << 17, 40_000, false},
		{"8 GiB", 128, Config{}, rule, 1 << 18, rule, true},
		{"16 GiB", 256, Config{}, rule, 1 << 19, rule, true},
		{"32 GiB", 512, Config{}, rule, 1 << 20, rule, true},
		{"32 GiB and 16 cores", 512, Config{}, 1 << 19, 1 << 20, 1 << 19, true},
		{"XDP takes its part", 64, Config{XDP: XDPAuto}, rule, 1 << 17, 25_000, false},
		{"a limit of 110 MiB", 46, Config{}, rule, 1 << 16, minFittedFlows, false},
		{"a flag", 64, Config{FlowTableSize: 1 << 20}, rule, 1 << 16, 1 << 20, true},
		{"fewer than the least", 512, Config{}, 5000, 1 << 20, 5000, true},
	} {
		cfg := row.cfg
		fitted, err := cfg.Fit(row.mib<<20, row.flows)
		must.Do(t, err)
		memory, err := cfg.Memory()
		must.Do(t, err)
		if fitted != memory {
			t.Errorf("%s: %d bytes, want %d", row.name, fitted, memory)
		}
		if cfg.MaxEndpoints != row.endpoints || cfg.MaxFrontends != row.endpoints/2 {
			t.Errorf("%s: %d endpoints and %d frontends, want %d and half of it", row.name, cfg.MaxEndpoints, cfg.MaxFrontends, row.endpoints)
		}
		switch {
		case row.whole && cfg.FlowTableSize != row.least, cfg.FlowTableSize < row.least:
			t.Errorf("%s: %d flows, want %d", row.name, cfg.FlowTableSize, row.least)
		case row.cfg.FlowTableSize == 0 && cfg.FlowTableSize > minFittedFlows && memory > row.mib<<20:
			t.Errorf("%s: %d flows in %d MiB", row.name, cfg.FlowTableSize, memory>>20)
		case !row.whole && cfg.FlowTableSize > minFittedFlows && memory < (row.mib-1)<<20:
			t.Errorf("%s: %d MiB, which leaves memory unused", row.name, memory>>20)
		}
	}
}

// TestMapsFitIntoAMemoryLimit runs itself in a cgroup with a limit of 128 MiB.
func TestMapsFitIntoAMemoryLimit(t *testing.T) {
	const limit, inside = 128 << 20, "SPILLWAY_TEST_CGROUP"
	if file := os.Getenv(inside); file != "" {
		fitInside(t, file, limit)
		return
	}
	file := limitedCgroup(t, limit)
	script := `echo $$ > "$1"; shift; exec "$@"`
	cmd := exec.Command("sh", "-c", script, "sh", filepath.Join(filepath.Dir(file), "cgroup.procs"), os.Args[0], "-test.v",
		"-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), inside+"="+file)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("in the cgroup: %v\n%s", err, out)
	}
}

func fitInside(t *testing.T, file string, limit uint64) {
	if have, in := kernel.MemoryLimit(); have != limit || in != file {
		t.Errorf("the limit is %d in %q, want %d in %q", have, in, limit, file)
	}
	cfg := Config{}
	_, err := cfg.Fit(limit/2, DefaultFlowTableSize)
	must.Do(t, err)
	all, err := newMaps(&cfg)
	must.Do(t, err)
	all.Close()
}

// Beyond a limit, the kernel refuses a map, or kills the process in which another thread needs a
// page at that moment.
func TestAMapWithoutMemoryIsExplained(t *testing.T) {
	cfg := Config{FlowTableSize: DefaultFlowTableSize, MaxFrontends: DefaultMaxFrontends, MaxEndpoints: DefaultMaxEndpoints}
	text := cfg.withMemory(fmt.Errorf("map flows: map create: %w", unix.ENOMEM)).Error()
	need, err := cfg.Memory()
	must.Do(t, err)
	limit := "no memory limit"
	if bytes, file := kernel.MemoryLimit(); bytes > 0 {
		limit = fmt.Sprintf("the memory limit is %d MiB (%s)", bytes>>20, file)
	}
	for _, part := range []string{"map flows: map create: cannot allocate memory", fmt.Sprintf("the maps need %d MiB", need>>20),
		"flow table of 262144 flows", limit, "--conntrack-min"} {
		if !strings.Contains(text, part) {
			t.Errorf("the error does not say %q: %s", part, text)
		}
	}
	if other := errors.New("x"); cfg.withMemory(other) != other {
		t.Error("another error is changed")
	}
}

// limitedCgroup makes a cgroup with a memory limit below that of this process, and returns the
// file with the limit.
func limitedCgroup(t *testing.T, limit uint64) string {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	must.Do(t, err)
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return !strings.HasPrefix(m.FSType, "cgroup"), false })
	must.Do(t, err)
	for line := range strings.Lines(string(own)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, m := range mounts {
			name := map[bool]string{true: "memory.max", false: "memory.limit_in_bytes"}[m.FSType == "cgroup2"]
			if (m.FSType == "cgroup2") != (fields[1] == "") || m.FSType == "cgroup" && (fields[1] != "memory" || m.VFSOptions != "rw,memory") {
				continue
			}
			dir := filepath.Join(m.Mountpoint, fields[2], fmt.Sprintf("spw-test-%d-memory", os.Getpid()))
			if os.Mkdir(dir, 0o755) != nil {
				continue
			}
			t.Cleanup(func() { must.Do(t, os.Remove(dir)) })
			file := filepath.Join(dir, name)
			if os.WriteFile(file, []byte(fmt.Sprint(limit)), 0o644) == nil {
				return file
			}
		}
	}
	t.Skip("no memory controller for a cgroup below this process's")
	return ""
}
