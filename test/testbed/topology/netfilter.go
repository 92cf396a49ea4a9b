package topology

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
)

// masqueradeTable and conntrackTable are the names of the lab's nft tables.
const (
	masqueradeTable = "flannel-masq"
	conntrackTable  = "spillway-lab-conntrack"
)

// loadNetfilter loads the rules of the spec into each node.
func (b *builder) loadNetfilter(ctx context.Context) error {
	s := b.c.Spec
	if !s.Masquerade && !s.Conntrack {
		return nil
	}
	for _, node := range b.c.nodes {
		var rules strings.Builder
		if s.Masquerade {
			for _, p := range pick(node.families, [2]netip.Prefix{s.ClusterCIDR4, node.podCIDR4},
				[2]netip.Prefix{s.ClusterCIDR6, node.podCIDR6}) {
				writeMasquerade(&rules, p[0], p[1])
			}
		}
		if s.Conntrack {
			writeConntrack(&rules)
		}
		cmd := node.Command(ctx, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("load nft rules on %s: %w: %s", node.Name, err, firstLine(out))
		}
	}
	return nil
}

// writeMasquerade writes flannel's masquerading. Traffic within the pod network keeps its
// addresses. Traffic that leaves it gets the node's address, as does traffic from outside
// to another node's pods.
func writeMasquerade(w *strings.Builder, cluster, own netip.Prefix) {
	family, multicast := "ip", "224.0.0.0/4"
	if cluster.Addr().Is6() {
		family, multicast = "ip6", "ff00::/8"
	}
	// The first two lines make a second load replace the first.
	fmt.Fprintf(w, `table %[1]s %[2]s
delete table %[1]s %[2]s
table %[1]s %[2]s {
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		%[1]s saddr %[3]s %[1]s daddr %[3]s return
		%[1]s saddr %[3]s %[1]s daddr != %[5]s masquerade fully-random
		%[1]s daddr %[4]s return
		%[1]s daddr %[3]s masquerade fully-random
	}
}
`, family, masqueradeTable, cluster, own, multicast)
}

// writeConntrack writes a rule that reads the conntrack state: one such rule makes the
// kernel track everything. No packet traverses it, so that a measurement shows conntrack
// alone.
func writeConntrack(w *strings.Builder) {
	fmt.Fprintf(w, `table inet %[1]s
delete table inet %[1]s
table inet %[1]s {
	chain unused {
		ct state invalid accept
	}
}
`, conntrackTable)
}

func firstLine(text []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	return line
}
