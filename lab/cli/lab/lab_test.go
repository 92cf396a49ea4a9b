package lab

import (
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/test/testbed/topology"
)

func TestEveryLabVerbTakesTheNameByFlag(t *testing.T) {
	lab := NewCommand()
	for _, verb := range []string{"up", "down", "exec", "status", "nodes"} {
		cmd, _, err := lab.Find([]string{verb})
		if err != nil {
			t.Fatal(err)
		}
		if cmd.Flags().Lookup("name") == nil {
			t.Errorf("lab %s has no --name", verb)
		}
	}
	isCluster := func(name string) bool { return name == "quick" }
	for _, c := range []struct {
		flag, args, cluster, host, argv string
	}{
		{"", "node0 -- ip -br a", "lab", "node0", "ip -br a"},
		{"", "node0 ip -br a", "lab", "node0", "ip -br a"},
		{"quick", "node0 -- ip -br a", "quick", "node0", "ip -br a"},
		{"other", "quick ip a", "other", "quick", "ip a"}, // a host of that name
		{"", "quick node0 -- ip a", "quick", "node0", "ip a"},
		{"", "quick node0 ip", "quick", "node0", "ip"},
		{"", "quick -- ip a", "lab", "quick", "ip a"},
	} {
		name := "lab"
		if c.flag != "" {
			name = c.flag
		}
		host, argv, err := execArgs(&name, c.flag != "", strings.Fields(c.args), isCluster)
		if err != nil || name != c.cluster || host != c.host || strings.Join(argv, " ") != c.argv {
			t.Errorf("--name %q %s: cluster %q, host %q, command %q, %v", c.flag, c.args, name, host, argv, err)
		}
	}
}

func TestTablesFitTheTerminal(t *testing.T) {
	clitest.Pages(t, "list", listExperiments(false))
	host := func(name, ip string) labHost {
		return labHost{&topology.Host{Name: name, Namespace: "spw-quick-" + name, IPv4: netip.MustParseAddr(ip)}, 2, 262144}
	}
	clitest.Pages(t, "status", labStatuses{{Name: "quick", Status: topology.StatusUp,
		Hosts: []labHost{host("node0", "172.30.0.10"), host("node0-pod0", "10.244.0.2")}}})
}
