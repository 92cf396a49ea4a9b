package life

import (
	"regexp"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// switchEgress hands the connections of pods to the outside back to the CNI's rule, and takes them again.
func switchEgress(t *testing.T, c *cluster.Cluster) {
	waitEgress(t, c)
	for _, mode := range []string{"off", "auto"} {
		clustertest.Must(t, c.InstallSpillway(t.Context(), "egress.mode="+mode))
		clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
	}
	waitEgress(t, c)
}

// egressConnections is the counter of a dataplane's connections of pods to the outside, from 1 on.
var egressConnections = regexp.MustCompile(
	`(?m)^spillway_(ebpf_verdicts_total\{verdict="egress_created"\}|egress_connections_total\{family="IPv4"\}) [1-9]`)

// waitEgress waits until the agents of the askers' nodes have given connections of pods the node's address.
// With iptables the agents do not count them.
func waitEgress(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	if *proxyMode == "iptables" {
		return
	}
	for _, i := range []int{0, 1} {
		n := c.Node(i)
		await.True(t, n.Name()+" gives connections of pods its address", func() bool {
			out, err := n.Command(t.Context(), "curl", "--silent", "http://127.0.0.1:10249/metrics").Output()
			return err == nil && egressConnections.Match(out)
		})
	}
}
