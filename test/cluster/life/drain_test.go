package life

import (
	"fmt"
	"slices"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/flows/probe"
)

// movers are two more Pods of the peers' Service, as docs/how-to/drain-a-node.md wants
// them: after SIGTERM a Pod is no longer ready, but serves for 15 seconds.
const movers = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: mover}
spec:
  replicas: 2
  selector: {matchLabels: {app: mover}}
  template:
    metadata: {labels: {app: mover, service: peer}}
    spec:
      terminationGracePeriodSeconds: 30
      containers:
        - name: mover
          image: %s
          imagePullPolicy: Never
          args: [netexec, --delay-shutdown=15]
          readinessProbe: {httpGet: {path: /readyz, port: 8080}, periodSeconds: 1, failureThreshold: 1}
`

// startMovers starts the movers on node2.
func startMovers(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	image, err := images.Reference("agnhost")
	clustertest.Must(t, err)
	others := []string{"node0", "node1"}
	kubectl(t, c, append([]string{"cordon"}, others...)...)
	clustertest.Must(t, c.Apply(t.Context(), fmt.Sprintf(movers, image)))
	clustertest.Must(t, c.WaitForRollout(t.Context(), "default", "deployment/mover"))
	kubectl(t, c, append([]string{"uncordon"}, others...)...)
}

// drain drains node2, which has two of the Service's four endpoints. Each asker has a TCP
// connection and a UDP socket with one of the two, and client0 asks by node2 as well.
func drain(t *testing.T, c *cluster.Cluster, l *load) {
	const node = 2
	pods, err := c.Pods(t.Context(), "default", "app=mover")
	clustertest.Must(t, err)
	var here []string
	for _, pod := range pods {
		if pod.Node() == c.Node(node).Name() {
			here = append(here, pod.Name)
		}
	}
	if len(here) != 2 {
		t.Fatalf("endpoints on the node to drain: %v, want two", here)
	}
	for from := range l.probes {
		for _, proto := range []string{"tcp", "udp"} {
			// A connected UDP socket of a node stays with its endpoint: docs/reference/limits.md.
			l.streamTo(t, here, from, probe.Request{Proto: proto, Dst: l.service(c, from), Unconnected: proto == "udp" && from == "node1"})
		}
	}
	for _, proto := range []string{"tcp", "udp", "new-tcp", "new-udp"} {
		l.streamTo(t, here, "client0", probe.Request{Proto: proto, Dst: outside(c, node)})
	}
	name := c.Node(node).Name()
	kubectl(t, c, "drain", name, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=2m")
	clustertest.Must(t, c.WaitForRollout(t.Context(), "default", "deployment/mover"))
	kubectl(t, c, "uncordon", name)
}

// streamTo starts streams until one of these servers answers the first question of one.
func (l *load) streamTo(t *testing.T, servers []string, from string, req probe.Request) {
	t.Helper()
	for i := range 30 {
		req.Name = fmt.Sprintf("%s from %s to %s (%d)", req.Proto, from, req.Dst, i)
		if slices.Contains(servers, l.streamPeer(t, from, req)) {
			return
		}
	}
	t.Fatalf("%s from %s to %s: none of %v answers, and others do", req.Proto, from, req.Dst, servers)
}
