package life

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	clientcmd "k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// viewer is an account that has the chart's roles for viewers, and one that has no rights.
const viewer = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: viewer, namespace: default}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: stranger, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: viewer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: spillway-viewer}
subjects: [{kind: ServiceAccount, name: viewer, namespace: default}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: viewer, namespace: kube-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: spillway-viewer}
subjects: [{kind: ServiceAccount, name: viewer, namespace: default}]
`

// viewerAsks asks the agents of all nodes from outside the cluster, with the rights of the
// chart's viewer and no others.
func viewerAsks(t *testing.T, c *cluster.Cluster) {
	clustertest.Must(t, c.Apply(t.Context(), viewer))
	program := filepath.Join(t.TempDir(), "kubectl-spillway")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./cmd/spillway")
	build.Dir = "../../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build spillway: %v: %s", err, out)
	}

	out, errs, err := run(t, c, program, kubeconfig(t, c, "viewer"), "status", "--all-nodes", "-o", "json")
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
	if err != nil || json.Unmarshal([]byte(out), &got) != nil {
		t.Fatalf("%v: %s %s", err, errs, out)
	}
	if len(got.Nodes) != 3 || !got.Complete {
		t.Errorf("%d nodes, complete: %v, want 3: %s", len(got.Nodes), got.Complete, out)
	}
	for _, n := range got.Nodes {
		if n.Error != "" || n.Status.Node != n.Node || n.Status.Sync.Services == 0 {
			t.Errorf("%+v", n)
		}
	}
	clustertest.WaitUntil(t, "no program is left in the agents' containers", func() bool {
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
		out, errs, err := run(t, c, program, file, "status", "--all-nodes")
		if err == nil || out != "" || !strings.Contains(errs, row.want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: %v: %q, %q, want %q", row.user, err, out, errs, row.want)
		}
	}

	pod := strings.Fields(kubectl(t, c, "get", "pods", "--selector=app.kubernetes.io/name=spillway", "--output=name"))[0]
	_, err = c.Kubectl(t.Context(), "--kubeconfig", kubeconfig(t, c, "viewer"), "exec", "--namespace=kube-system", pod, "--", "spillway", "version")
	if err == nil || !strings.Contains(err.Error(), "the Role spillway-viewer allows") {
		t.Errorf("another command of a viewer: %v", err)
	}
	_, err = c.Kubectl(t.Context(), "delete", "clusterrolebinding/viewer", "--ignore-not-found")
	clustertest.Must(t, err)
	kubectl(t, c, "delete", "rolebinding/viewer")
}

// run runs a program on the client outside the cluster, with a kubeconfig.
func run(t *testing.T, c *cluster.Cluster, program, kubeconfig string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := c.Client().Command(t.Context(), append([]string{program}, args...)...)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+kubeconfig)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
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
