package privilege

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/suite"
)

// TestMeasure logs what does not work with the capabilities of -measure alone.
func TestMeasure(t *testing.T) {
	if *measure == "" {
		return
	}
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) {
			for use, err := range try(t, m, confinement{Capabilities: strings.Split(*measure, ",")}) {
				t.Logf("%s: %v", use, err)
			}
		})
	}
}

// TestFlowsWithTheChartsCapabilities runs flows on three nodes whose agents have the
// chart's capabilities and no others.
func TestFlowsWithTheChartsCapabilities(t *testing.T) {
	t.Parallel()
	for _, m := range oneMode() {
		t.Run(m.String(), func(t *testing.T) {
			n := newNode(t, m, 3)
			list := granted(t, m.name)
			n.confine(confinement{Capabilities: list})
			if err := n.StartAgents(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Run("flows", func(t *testing.T) { suite.New(n.Cluster).Run(t, flows.EverywhereCases()) })
			if err := noComplaint(n, m); err != nil {
				t.Error(err)
			}
			if err := n.holds(without(without(list, "SYS_ADMIN"), "PERFMON")); err != nil {
				t.Error(err)
			}
		})
	}
}

// holds compares the capabilities of every thread of the agents with a list.
func (n *node) holds(list []string) error {
	host, err := n.Host("a")
	if err != nil {
		return err
	}
	pids, err := host.Processes()
	if err != nil {
		return err
	}
	seen := 0
	for _, pid := range pids {
		if exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); exe != n.binary {
			continue
		}
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil {
			return err
		}
		for _, task := range tasks {
			mask, err := effective(task)
			if errors.Is(err, fs.ErrNotExist) {
				continue // the thread has ended
			}
			if err != nil {
				return err
			}
			if want := maskOf(list); mask != want {
				return fmt.Errorf("%s: capabilities %#x, want %#x", task, mask, want)
			}
			seen++
		}
	}
	if seen == 0 {
		return errors.New("no thread of the agent was found: the test is blind")
	}
	return nil
}

func without(list []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == name })
}

// TestTheChartsCapabilitiesAreEnough goes through everything that an agent needs
// capabilities for, below the profile that RuntimeDefault means.
func TestTheChartsCapabilitiesAreEnough(t *testing.T) {
	t.Parallel()
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) {
			for use, err := range try(t, m, confinement{Capabilities: granted(t, m.name), Seccomp: runtimeDefault(t, granted(t, m.name))}) {
				t.Errorf("%s: %v", use, err)
			}
		})
	}
}

// lost is what does not work without a capability.
var lost = []struct {
	mode       mode
	capability string
	use        string
}{
	{mode{"ebpf", ""}, "BPF", start},
	{mode{"ebpf", ""}, "NET_ADMIN", start},
	{mode{"ebpf", ""}, "PERFMON", start},
	{mode{"ebpf", ""}, "NET_BROADCAST", findPodAddress},
	{mode{"ebpf", ""}, "NET_RAW", removeLeftovers},
	{mode{"nftables", ""}, "BPF", removeLeftovers},
	{mode{"nftables", ""}, "NET_ADMIN", start},
	{mode{"nftables", ""}, "NET_RAW", removeLeftovers},
	{mode{"iptables", "legacy"}, "BPF", removeLeftovers},
	{mode{"iptables", "legacy"}, "NET_ADMIN", start},
	{mode{"iptables", "legacy"}, "NET_RAW", useLegacy},
}

// TestEveryCapabilityOfTheChartIsNeeded leaves out one after the other. SYS_ADMIN,
// which includes others, is left out as well: see below. What RuntimeDefault allows
// depends on the capabilities.
func TestEveryCapabilityOfTheChartIsNeeded(t *testing.T) {
	t.Parallel()
	for _, l := range lost {
		t.Run(l.mode.String()+" without "+l.capability, func(t *testing.T) {
			list := without(without(granted(t, l.mode.name), "SYS_ADMIN"), l.capability)
			failed := tryInVain(t, l.mode, confinement{Capabilities: list, Seccomp: runtimeDefault(t, list)}, start, l.use)
			if err := failed[start]; err != nil && l.use != start {
				t.Fatalf("the agent does not start without %s: %v", l.capability, err)
			}
			if failed[l.use] == nil {
				t.Errorf("%q works without %s: does the chart have to grant it?", l.use, l.capability)
			}
		})
	}
	for _, name := range []string{"ebpf", "nftables", "iptables"} {
		for _, c := range granted(t, name) {
			known := slices.Contains([]string{"SYS_ADMIN", "SYS_MODULE"}, c) // the values sysAdmin and loadModules
			for _, l := range lost {
				known = known || l.mode.name == name && l.capability == c
			}
			if !known {
				t.Errorf("the chart grants %s in mode %s: nothing here says what for", c, name)
			}
		}
	}
}

// TestSysAdminIsNeededOnlyWhereConntrackIsAModule runs an agent without it. Where
// conntrack is a module the agent serves all the same, but its programs cannot ask
// conntrack for a connection.
func TestSysAdminIsNeededOnlyWhereConntrackIsAModule(t *testing.T) {
	for use, err := range try(t, mode{"ebpf", ""}, confinement{Capabilities: without(granted(t, "ebpf"), "SYS_ADMIN")}, start,
		"serve Services", "restart after SIGKILL", "repair removed pins", "log no complaint") {
		t.Errorf("%s: %v", use, err)
	}
}
