package notrack

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// Case is the policy that is in force.
type Case string

// The cases; "" is no policy.
const (
	TrackPolicy      Case = "track"
	DoNotTrackPolicy Case = "do-not-track"
	NodePolicy       Case = "node" // do-not-track, for the node's own server
)

// widenPorts gives a client more source ports.
func widenPorts() error {
	return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("1024 65000"), 0)
}

func (b *bench) writeManifests() error {
	c := b.tracked.Cluster
	nodes, err := c.NodesYAML()
	if err != nil {
		return err
	}
	pod := fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: cache, namespace: bench, labels: {app: cache}}
spec: {nodeName: %s}
status: {podIP: %s, podIPs: [{ip: %[2]s}]}
`, c.Node(0).Name, c.Pod(0, 0).IPv4)
	for i := range clients { // to the policy they are pods of another node
		pod += fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: client%d, namespace: bench, labels: {app: client}}
spec: {nodeName: elsewhere}
status: {podIP: %s, podIPs: [{ip: %[2]s}]}
`, i, c.Client(i).IPv4)
	}
	if _, err := b.tracked.WriteFile("manifests/nodes.yaml", nodes); err != nil {
		return err
	}
	if _, err := b.tracked.WriteFile("manifests/pod.yaml", []byte(pod)); err != nil {
		return err
	}
	b.manifests = b.tracked.Path("manifests")
	return nil
}

// policyText is a policy whose peers are the clients.
func (b *bench) policyText(c Case) string {
	subject, port := "podSelector: {matchLabels: {app: cache}}", podPort
	if c == NodePolicy {
		subject, port = "nodeSelector: {matchExpressions: [{key: topology.kubernetes.io/zone, operator: Exists}]}", nodePort
	}
	return fmt.Sprintf(`
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: %s}
spec:
  %s
  deny: others
  track: %v
  ingress: [{ports: [{port: %d}], from: [{podSelector: {matchLabels: {app: client}}}]}]
`, c, subject, c == TrackPolicy, port)
}

// setPolicy writes a policy and waits until the kernel has this policy only.
func (b *bench) setPolicy(ctx context.Context, c Case) error {
	if c == b.policy {
		return nil
	}
	path := b.tracked.Path("manifests/policy.yaml")
	if c == "" {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("remove policy: %w", err)
		}
	} else if err := writeAtOnce(path, b.policyText(c)); err != nil {
		return err
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		out, _ := b.tracked.Cluster.Node(0).Command(ctx, "nft", "list", "table", "inet", "spillway-policy").Output()
		text := string(out)
		there := strings.Contains(text, "chain in-"+string(c)+"-0-from")
		if c == "" && text == "" || c != "" && there && strings.Count(text, "-0-from {") == 1 {
			b.policy = c
			return nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("the agent has not applied policy %q within 10 s; nft shows %q", c, text)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// untrackAll turns conntrack and NAT on, without a rule that a packet would meet, and
// keeps conntrack away from every packet. This is the least that a policy of nftables can
// cost.
const untrackAll = `
table inet floor {
	chain unused {
		ct state invalid accept
	}
	chain dstnat {
		type nat hook prerouting priority dstnat;
	}
	chain srcnat {
		type nat hook postrouting priority srcnat;
	}
	chain prerouting {
		type filter hook prerouting priority raw;
		notrack
	}
	chain output {
		type filter hook output priority raw;
		notrack
	}
}
`

// setRules writes the only rules of the node without an agent.
func (b *bench) setRules(ctx context.Context, rules string) error {
	if rules == b.rules {
		return nil
	}
	cmd := b.bare.Cluster.Node(0).Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader("table inet floor\ndelete table inet floor\n" + rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("write rules of the node without an agent: %w: %s", err, out)
	}
	b.rules = rules
	return nil
}

// writeAtOnce replaces a file.
func writeAtOnce(path, text string) error {
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		return fmt.Errorf("write policy: %w", err)
	}
	return os.Rename(path+".new", path)
}

// table is the conntrack table of the node under test.
type table struct {
	node   *topology.Host
	filled bool
	free   int
}

// fill empties the table, or fills it with permanent established flows except for the
// given number of entries. Other entries expire after a few seconds.
func (t *table) fill(ctx context.Context, full bool, free int) error {
	if full && t.filled && t.free == free && free != slots {
		return nil // as it was left; earlier measurements have used some slots
	}
	if err := harness.EmptyConntrack(ctx, t.node); err != nil {
		return err
	}
	t.filled, t.free = full, free
	if !full {
		return nil
	}
	if err := t.node.Do(func() error {
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_time_wait", []byte(strconv.Itoa(giveUp)), 0)
	}); err != nil {
		return fmt.Errorf("set timeout: %w", err)
	}
	return harness.FillConntrack(ctx, t.node, free)
}
