package life

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// debugPage is the page of docs whose commands debugNode runs.
const debugPage = "how-to/debug-from-kubectl.md"

// debugNode debugs a node by kubectl alone: with 'kubectl debug', and with a Pod that sees
// the namespaces' names. Both report a problem of another network namespace than the node's.
func debugNode(t *testing.T, c *cluster.Cluster) {
	installPlugin(t)
	node, admin := c.Node(1), cluster.Kubeconfig(c.Name)
	script := `ip netns add planted
ip netns exec planted iptables -t nat -A POSTROUTING -j MASQUERADE
exec ip netns exec planted sleep infinity`
	process := node.Command(t.Context(), "bash", "-euc", script)
	clustertest.Must(t, process.Start())
	defer func() {
		_ = process.Process.Kill() // it runs until then
		_ = process.Wait()
		out, err := node.Command(t.Context(), "ip", "netns", "delete", "planted").CombinedOutput()
		if err != nil {
			t.Errorf("delete planted namespace: %v: %s", err, out)
		}
	}()

	image := kubectl(t, c, "get", "daemonset/spillway", "--output=jsonpath={.spec.template.spec.containers[0].image}")
	values := []string{"NODE", node.Name(), "REGISTRY/spillway:TAG", image}
	agent := shell(t, c, admin, block(t, debugPage, "POD=", values...)+"kubectl -n kube-system exec $POD -- spillway doctor")
	if strings.Contains(agent, "planted") || strings.Contains(agent, "sleep[") {
		t.Errorf("doctor in the agent's container sees other namespaces: %s", agent)
	}

	lines := strings.Split(strings.TrimSpace(block(t, debugPage, "kubectl debug", values...)), "\n")
	outs := make([]string, len(lines))
	var all errgroup.Group
	for i, line := range lines {
		all.Go(func() (err error) {
			var errs string
			outs[i], errs, err = run(t, c, admin, "script", "--quiet", "--return", "--command", line, "/dev/null") // -t needs a terminal
			outs[i] += errs
			return err
		})
	}
	if err := all.Wait(); err != nil {
		t.Errorf("%v: %s", err, strings.Join(outs, "\n"))
	}
	logs := shell(t, c, admin, block(t, debugPage, "managed-by=kubectl-debug"))
	for _, want := range []string{"masquerade-not-random in sleep[", "NAMESPACE", "following dropped packets"} {
		if !strings.Contains(logs, want) {
			t.Errorf("the logs of debug Pods lack %q: %s\nkubectl shows %s", want, logs, strings.Join(outs, "\n"))
		}
	}
	if count := strings.Count(logs, " deleted"); count != len(lines) {
		t.Errorf("%d debug Pods were deleted, want %d: %s", count, len(lines), logs)
	}

	dir := t.TempDir()
	clustertest.Must(t, os.WriteFile(filepath.Join(dir, "toolbox.yaml"), []byte(block(t, debugPage, "kind: Pod", values...)), 0o600))
	out := shell(t, c, admin, "cd "+dir+"\n"+block(t, debugPage, "toolbox.yaml"))
	if !strings.Contains(out, "masquerade-not-random in planted\n") {
		t.Errorf("the toolbox does not see the namespace by its name: %s", out)
	}
}
