package life

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientcmd "k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// viewer is an account that gets the chart's roles for viewers, and one without rights.
const viewer = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: viewer, namespace: default}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: stranger, namespace: default}
`

// plugin is the page of docs whose commands a viewer runs.
const plugin = "how-to/kubectl-plugin.md"

// viewerAsks asks the agents of all nodes from outside the cluster, with the rights of the
// chart's viewer and no others.
func viewerAsks(t *testing.T, c *cluster.Cluster) {
	clustertest.Must(t, c.Apply(t.Context(), viewer))
	program := installPlugin(t)
	shell(t, c, cluster.Kubeconfig(c.Name), block(t, plugin, "create rolebinding", "--group=on-call", "--serviceaccount=default:viewer"))
	own := kubeconfig(t, c, "viewer")
	asks := strings.Split(block(t, plugin, "kubectl spillway observe"), "\n")

	out := shell(t, c, own, asks[0]+" -o json")
	var got struct {
		Nodes []struct {
			Node, Error string
			Status      struct {
				Node string
				Sync struct{ Services int }
			}
		}
		Complete bool
	}
	clustertest.Must(t, json.Unmarshal([]byte(out), &got))
	if len(got.Nodes) != 3 || !got.Complete {
		t.Errorf("%d nodes, complete: %v, want 3: %s", len(got.Nodes), got.Complete, out)
	}
	for _, n := range got.Nodes {
		if n.Error != "" || n.Status.Node != n.Node || n.Status.Sync.Services == 0 {
			t.Errorf("%+v", n)
		}
	}
	if out := shell(t, c, own, asks[1]); !strings.Contains(out, "node2") {
		t.Errorf("%s: %s", asks[1], out)
	}
	if out := shell(t, c, own, "kubectl __complete spillway sta"); !strings.HasPrefix(out, "status\t") {
		t.Errorf("kubectl completes spillway sta with %q", out)
	}
	viewerWatches(t, c, own, strings.Fields(asks[2]))
	viewerOpensThePage(t, c, own, strings.Fields(strings.Split(asks[3], "#")[0]))
	reportsABug(t, c, program, own)
	await.True(t, "no program is left in the agents' containers", func() bool {
		for _, n := range c.AllNodes() {
			// pgrep exits with 1 if there is none.
			if out, _ := n.Command(t.Context(), "pgrep", "--full", "^spillway api-pipe").Output(); len(out) > 0 {
				return false
			}
		}
		return true
	})

	for _, row := range []struct{ user, want string }{
		{"stranger", "you may not list pods"},
		{"nobody", "read kubeconfig"},
	} {
		file := "/nonexistent"
		if row.user != "nobody" {
			file = kubeconfig(t, c, row.user)
		}
		out, errs, err := run(t, c, file, program, "status", "--all-nodes")
		if err == nil || out != "" || !strings.Contains(errs, row.want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: %v: %q, %q, want %q", row.user, err, out, errs, row.want)
		}
	}

	pod := strings.Fields(kubectl(t, c, "get", "pods", "--selector=app.kubernetes.io/name=spillway", "--output=name"))[0]
	_, err := c.Kubectl(t.Context(), "--kubeconfig", own, "exec", "--namespace=kube-system", pod, "--", "spillway", "version")
	if err == nil || !strings.Contains(err.Error(), "the Role spillway-viewer allows") {
		t.Errorf("another command of a viewer: %v", err)
	}
	kubectl(t, c, "delete", "clusterrolebinding/on-call-views", "rolebinding/on-call-views")
}

// kubeconfig writes a kubeconfig of an account.
func kubeconfig(t *testing.T, c *cluster.Cluster, account string) string {
	t.Helper()
	cfg, err := clientcmd.LoadFromFile(cluster.Kubeconfig(c.Name))
	clustertest.Must(t, err)
	token, err := c.Kubectl(t.Context(), "create", "token", account, "--namespace=default")
	clustertest.Must(t, err)
	cfg.AuthInfos = map[string]*clientcmdapi.AuthInfo{account: {Token: strings.TrimSpace(token)}}
	cfg.Contexts[cfg.CurrentContext].AuthInfo = account
	file := filepath.Join(t.TempDir(), account)
	text, err := clientcmd.Write(*cfg)
	clustertest.Must(t, err)
	clustertest.Must(t, os.WriteFile(file, text, 0o600))
	return file
}
