package privilege

import (
	"fmt"
	"syscall"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestXDPAttachesWithTheChartsPrivileges: also to a device that comes after the agent has dropped
// capabilities, and when an agent takes over the program of a killed one.
func TestXDPAttachesWithTheChartsPrivileges(t *testing.T) {
	t.Parallel()
	const values = "ebpf"
	spec := topology.DefaultSpec(fmt.Sprint("privilege-", clusters.Add(1)))
	spec.Nodes = 1
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	w := newWrapper(t, binary)
	flags := flagsOf(t, values)
	flags[""] = append(flags[""], "--xdp=generic") // the devices are veths
	h := harness.Up(t, cluster.Config{Spec: spec, Binary: w.path, Mode: "ebpf", Flags: flags})
	t.Cleanup(func() { w.confine(confinement{}) })
	n := &node{Harness: h, wrapper: w}
	n.confine(confinement{Capabilities: granted(t, values), Seccomp: runtimeDefault(t, granted(t, values))})
	if err := n.StartAgents(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantDevices := func(want float64) {
		t.Helper()
		await.NoError(t, func() error {
			have, err := agent.Metric(t.Context(), n.MustHost(t, "a"), "spillway_ebpf_xdp_interfaces", `mode="generic"`)
			if err == nil && have == want {
				return nil
			}
			return fmt.Errorf("%v devices have the program, want %v (%v)\n%s", have, want, err, n.Agent("a").Tail())
		})
	}
	before, err := agent.Metric(t.Context(), n.MustHost(t, "a"), "spillway_ebpf_xdp_interfaces", `mode="generic"`)
	if err != nil || before < 1 {
		t.Fatalf("%v devices have the program: %v\n%s", before, err, n.Agent("a").Tail())
	}
	n.Run(t, "a", "sh", "-c", "ip link add late0 type veth peer name late1 && ip addr add 198.51.100.1/24 dev late0 && ip link set late0 up")
	wantDevices(before + 1)
	if err := n.restart("ebpf", syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wantDevices(before + 1)
}
