package soak

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/testbed/agent"
)

// Usage is what an agent and its node's kernel hold.
type Usage struct {
	Node       string `json:"node"`
	RSS        int    `json:"rss_bytes"`
	Heap       int    `json:"heap_bytes"`
	Goroutines int    `json:"goroutines"`
	Files      int    `json:"files"`
	// Flows are entries of the flow table, Conntrack those of conntrack.
	Flows     int `json:"flows"`
	Conntrack int `json:"conntrack"`
	// Entries are those of all pinned maps of configuration, Pins pinned objects.
	Entries int `json:"map_entries"`
	Pins    int `json:"pinned_objects"`
	// Rules are rules, sets and maps of nftables, and rules of iptables-legacy.
	Rules int `json:"rules"`
}

// Growth is the usage of a node at the start and at the end.
type Growth struct {
	Start Usage `json:"start"`
	End   Usage `json:"end"`
	// Over names what grew beyond its bound.
	Over []string `json:"over,omitempty"`
}

const mib = 1 << 20

// bound is a limit of a figure at the end.
type bound struct {
	name  string
	of    func(Usage) int
	times int // of the start
	plus  int
	unit  int // that the table prints
}

// bounds are the documented limits. Figures that the configuration alone decides must not
// grow at all, since the configuration of the end is that of the start.
var bounds = []bound{
	{"RSS", func(u Usage) int { return u.RSS }, 2, 64 * mib, mib},
	{"HEAP", func(u Usage) int { return u.Heap }, 2, 32 * mib, mib},
	{"GOROUTINES", func(u Usage) int { return u.Goroutines }, 1, 20, 1},
	{"FILES", func(u Usage) int { return u.Files }, 1, 20, 1},
	{"FLOWS", func(u Usage) int { return u.Flows }, 4, 20_000, 1},
	{"CONNTRACK", func(u Usage) int { return u.Conntrack }, 4, 20_000, 1},
	{"ENTRIES", func(u Usage) int { return u.Entries }, 1, 0, 1},
	{"PINS", func(u Usage) int { return u.Pins }, 1, 0, 1},
	{"RULES", func(u Usage) int { return u.Rules }, 1, 0, 1},
}

// judge notes the figures that grew beyond their bounds.
func (g *Growth) judge() {
	g.Over = nil
	for _, b := range bounds {
		if end, limit := b.of(g.End), b.of(g.Start)*b.times+b.plus; end > limit {
			g.Over = append(g.Over, fmt.Sprintf("%s of %s: %d, limit %d", b.name, g.End.Node, end, limit))
		}
	}
}

// dynamic reads the figures that depend on the load.
func (a *nodeAgent) dynamic(ctx context.Context, u *Usage) error {
	u.Node = a.host.Name
	for name, at := range map[string]*int{
		"go_memstats_heap_inuse_bytes": &u.Heap, "process_resident_memory_bytes": &u.RSS,
		"go_goroutines": &u.Goroutines, "process_open_fds": &u.Files,
	} {
		v, err := agent.Metric(ctx, a.host, name, "")
		if err != nil {
			return err
		}
		*at = int(v)
	}
	var err error
	u.Conntrack, err = a.host.ConntrackCount()
	if err != nil {
		return err
	}
	_, u.Flows, err = a.entries()
	return err
}

// static reads the figures that the configuration decides.
func (a *nodeAgent) static(ctx context.Context, u *Usage) error {
	u.Node = a.host.Name
	var err error
	if u.Entries, _, err = a.entries(); err != nil {
		return err
	}
	u.Pins = 0
	err = filepath.WalkDir(a.bpffs, func(_ string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // no node has pins while it uses netfilter
		}
		if err == nil && !d.IsDir() {
			u.Pins++
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("count pinned objects: %w", err)
	}
	u.Rules, err = a.countRules(ctx)
	return err
}

// keptTable stays for a day after a do-not-track policy is deleted, for connections of before
// (do-not-track.md).
const keptTable = "spillway-policy-left"

// countRules counts the rules, sets and maps of nftables, and the lines of
// iptables-legacy. Tables and built-in chains that iptables-nft made stay, as kube-proxy's do.
func (a *nodeAgent) countRules(ctx context.Context) (int, error) {
	text, err := a.output(ctx, "nft", "-j", "list", "ruleset")
	if err != nil {
		return 0, err
	}
	var ruleset struct {
		Objects []map[string]struct{ Table string } `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(text), &ruleset); err != nil {
		return 0, fmt.Errorf("read ruleset of %s: %w", a.host.Name, err)
	}
	count := 0
	for _, o := range ruleset.Objects {
		for _, kind := range []string{"rule", "set", "map"} {
			if at, ok := o[kind]; ok && at.Table != keptTable {
				count++
			}
		}
	}
	for _, program := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		text, err := a.output(ctx, program)
		if err != nil {
			return 0, err
		}
		count += strings.Count(text, "\n-A")
	}
	return count, nil
}

// configMaps are the pinned maps whose entries the agent writes.
var configMaps = []string{"frontends", "services", "slots", "backends", "pods", "node_addrs", "uplinks", "l3_devices",
	"untracked_ports", "untracked_pods", "source_ranges", "untracked_blocks"}

// entries counts the entries of the node's pinned maps.
func (a *nodeAgent) entries() (config, flows int, err error) {
	for _, name := range append([]string{"flows"}, configMaps...) {
		pins, err := filepath.Glob(filepath.Join(a.bpffs, "maps-v*", name))
		if err != nil {
			return 0, 0, err
		}
		for _, pin := range pins {
			n, err := count(pin)
			if err != nil {
				return 0, 0, fmt.Errorf("count entries of %s on %s: %w", name, a.host.Name, err)
			}
			if name == "flows" {
				flows += n
			} else {
				config += n
			}
		}
	}
	return config, flows, nil
}

// count counts the keys of a pinned map.
func count(pin string) (int, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return 0, err
	}
	defer m.Close()
	n := 0
	var key any // the first time nil, which asks for the first key
	for {
		next, err := m.NextKeyBytes(key)
		if err != nil {
			return n, err
		}
		if next == nil || n > int(m.MaxEntries()) { // a table that changes may begin anew
			return n, nil
		}
		n, key = n+1, next
	}
}

// cpuSeconds returns the CPU time of the cluster's processes and of the calling one.
func cpuSeconds(cgroup string) float64 {
	total := 0.0
	text, _ := os.ReadFile(filepath.Join(cgroup, "cpu.stat")) // without it the own time remains
	for line := range strings.Lines(string(text)) {
		if usage, ok := strings.CutPrefix(line, "usage_usec "); ok {
			n, _ := strconv.ParseFloat(strings.TrimSpace(usage), 64)
			total += n / 1e6
		}
	}
	var own unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &own) == nil {
		total += float64(own.Utime.Nano()+own.Stime.Nano()) / 1e9
	}
	return total
}
