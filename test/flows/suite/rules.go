package suite

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows/cluster"
)

// addRules loads the case's nftables rules into its nodes, in a table of the
// case's own, and removes them when the case is over.
func (r *running) addRules(t *testing.T) {
	t.Helper()
	for node, rules := range r.c.Rules {
		table := "inet flows-" + r.load.Scope.Namespace
		text := fmt.Sprintf("table %s {\nchain forward {\ntype filter hook forward priority filter; policy accept;\n%s\n}\n}\n",
			table, expandAddrs(r.s.Cluster, strings.Join(rules, "\n")))
		if err := runNft(r.s.Cluster, node, text); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := runNft(r.s.Cluster, node, "delete table "+table+"\n"); err != nil {
				t.Error(err)
			}
		})
	}
}

var placeholder = regexp.MustCompile(`\$\{([a-z0-9/]+)(\.6)?\}`)

// expandAddrs puts addresses in the place of ${a0} (IPv4) and ${a0.6} (IPv6).
func expandAddrs(c *cluster.Cluster, text string) string {
	return placeholder.ReplaceAllStringFunc(text, func(found string) string {
		m := placeholder.FindStringSubmatch(found)
		return c.Addr(m[1], m[2] != "").String()
	})
}

func runNft(c *cluster.Cluster, node, text string) error {
	host, err := c.Host(node)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), await.Limit)
	defer cancel()
	cmd := host.Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load nftables rules on %s: %w: %s", node, err, strings.TrimSpace(string(out)))
	}
	return nil
}
