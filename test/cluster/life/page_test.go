package life

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/programs"
)

// block returns the block of code of a page of docs that contains a text. values replaces
// words of it.
func block(t *testing.T, page, containing string, values ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), "docs", page))
	clustertest.Must(t, err)
	for i, part := range strings.Split("\n"+string(text), "\n```") {
		_, code, _ := strings.Cut(part, "\n") // the first line is the language
		if i%2 == 1 && strings.Contains(code, containing) {
			return strings.NewReplacer(values...).Replace(code) + "\n"
		}
	}
	t.Fatalf("docs/%s: no block of code contains %q", page, containing)
	return ""
}

// installPlugin installs spillway as a plugin beside kubectl: the rest of the test finds both
// in PATH. It returns the path of spillway.
func installPlugin(t *testing.T) string {
	t.Helper()
	dir, program := t.TempDir(), filepath.Join(clustertest.Image(t), "linux-"+runtime.GOARCH, "spillway")
	clustertest.Must(t, os.Symlink(program, filepath.Join(dir, "kubectl-spillway")))
	completion := block(t, "how-to/kubectl-plugin.md", "__complete")
	clustertest.Must(t, os.WriteFile(filepath.Join(dir, "kubectl_complete-spillway"), []byte(completion), 0o755))
	kubectl, err := programs.Build(t.Context(), t.Output(), "kubectl")
	clustertest.Must(t, err)
	t.Setenv("PATH", strings.Join([]string{dir, kubectl, os.Getenv("PATH")}, ":"))
	return program
}

// shell runs lines of a shell on the client outside the cluster, with a kubeconfig, and
// returns their output.
func shell(t *testing.T, c *cluster.Cluster, kubeconfig, lines string) string {
	t.Helper()
	out, errs, err := run(t, c, kubeconfig, "bash", "-euo", "pipefail", "-c", lines)
	if err != nil {
		t.Fatalf("%v: %s\n%s%s", err, lines, out, errs)
	}
	return out
}

// run runs a program on the client outside the cluster, with a kubeconfig.
func run(t *testing.T, c *cluster.Cluster, kubeconfig string, argv ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := c.Client().Command(t.Context(), argv...)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+kubeconfig)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := programs.Root()
	clustertest.Must(t, err)
	return dir
}
