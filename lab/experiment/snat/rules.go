package snat

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// masqueradeRules returns flannel's rules of nat (pkg/trafficmngr/iptables). --random-fully
// is its default where iptables has it; other CNIs do not use it.
func masqueradeRules(cluster, own netip.Prefix, flags string, ports int) string {
	protocol := ""
	if ports > 0 { // iptables takes a range of ports with a protocol only
		protocol, flags = "-p tcp ", fmt.Sprintf("--to-ports %d-%d %s", firstPort, firstPort+ports-1, flags)
	}
	masquerade := strings.TrimSpace("MASQUERADE " + flags)
	return fmt.Sprintf(`*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN
-A FLANNEL-POSTRTG -s %[2]s -d %[1]s -j RETURN
-A FLANNEL-POSTRTG -s %[1]s -d %[2]s -j RETURN
-A FLANNEL-POSTRTG ! -s %[1]s -d %[2]s -j RETURN
-A FLANNEL-POSTRTG %[4]s-s %[1]s ! -d 224.0.0.0/4 -j %[3]s
-A FLANNEL-POSTRTG %[4]s! -s %[1]s -d %[1]s -j %[3]s
COMMIT
`, cluster, own, masquerade, protocol)
}

// restore loads rules of iptables.
func restore(ctx context.Context, node *topology.Host, rules string) error {
	cmd := node.Command(ctx, "iptables-restore", "--wait")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load rules on %s: %w: %s", node.Name, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// masqueraded returns how many connections met the CNI's rule: nat sees a connection's
// first packet alone.
func masqueraded(ctx context.Context, node *topology.Host) (uint64, error) {
	out, err := node.Command(ctx, "iptables-save", "-c", "-t", "nat").Output()
	if err != nil {
		return 0, fmt.Errorf("read counters of rules: %w", err)
	}
	return countMasqueraded(string(out))
}

// countMasqueraded adds up the packets of the CNI's masquerade rules in the output of
// iptables-save -c.
func countMasqueraded(saved string) (sum uint64, err error) {
	found := false
	for line := range strings.Lines(saved) {
		counters, rule, ok := strings.Cut(line, "] ")
		if !ok || !strings.HasPrefix(rule, "-A FLANNEL-POSTRTG ") || !strings.Contains(rule, "-j MASQUERADE") {
			continue
		}
		packets, _, _ := strings.Cut(strings.TrimPrefix(counters, "["), ":")
		n, err := strconv.ParseUint(packets, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read counters of rules: %q: %w", strings.TrimSpace(line), err)
		}
		sum, found = sum+n, true
	}
	if !found {
		return 0, fmt.Errorf("read counters of rules: chain FLANNEL-POSTRTG masquerades nothing")
	}
	return sum, nil
}

// delayTable returns a table whose rules match nothing. A first packet meets them after the
// rules of nat and before its entry is in conntrack's table.
func delayTable(rules int) string {
	return `table ip spillway-lab-delay {
	chain delay {
` + strings.Repeat("\t\tmeta mark 0x7fffffff counter\n", rules) + `	}
	chain postrouting {
		type filter hook postrouting priority srcnat + 50;
		ct state new jump delay
	}
}
`
}

func loadDelay(ctx context.Context, node *topology.Host, rules int) error {
	cmd := node.Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(delayTable(rules))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load the rules that delay packets on %s: %w: %.300s", node.Name, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// writeNodes writes manifests of the nodes alone.
func writeNodes(r *harness.Harness) (dir string, err error) {
	nodes, err := r.Cluster.NodesYAML()
	if err != nil {
		return "", err
	}
	_, err = r.WriteFile("manifests/nodes.yaml", nodes)
	return r.Path("manifests"), err
}
