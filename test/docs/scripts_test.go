package docs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// script prepares a script of hack with these programs in front of PATH and an empty cache.
func script(t *testing.T, programs string, argv ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"), "XDG_CACHE_HOME="+programs)
	return cmd
}

func TestScriptsParse(t *testing.T) {
	scripts := []string{".ci/run", "test/cluster/node.sh"}
	files, err := filepath.Glob(filepath.Join(root, "hack", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && bytes.HasPrefix(text, []byte("#!/bin/bash\n")) {
			scripts = append(scripts, "hack/"+filepath.Base(file))
		}
	}
	if !slices.Contains(scripts, "hack/fresh") {
		t.Errorf("scripts %q, want hack/fresh among them", scripts)
	}
	for _, s := range scripts {
		if out, err := script(t, t.TempDir(), "bash", "-n", s).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", s, err, out)
		}
	}
}

func TestScriptsRefuseWrongUsage(t *testing.T) {
	for _, argv := range [][]string{
		{"hack/deps"}, {"hack/deps", "test", "no-such-group"}, {"hack/peers", "etcd", "no-such-program"},
		{"hack/fresh"}, {"hack/fresh", "no-such-target"}, {"hack/fresh", "build no-such-target"}, {"hack/fresh", "--no-such-flag"},
	} {
		cmd := script(t, t.TempDir(), argv...)
		var message strings.Builder
		cmd.Stderr = &message
		out, _ := cmd.Output()
		if cmd.ProcessState.ExitCode() != 2 || len(out) > 0 || !strings.Contains(message.String(), argv[0]) {
			t.Errorf("%q: exit code %d, output %q, message %q, want 2 and a message alone", argv, cmd.ProcessState.ExitCode(), out, &message)
		}
	}
	if out, err := script(t, t.TempDir(), "hack/fresh", "--help").Output(); err != nil ||
		!strings.Contains(string(out), "hack/fresh TARGET...") {
		t.Errorf("hack/fresh --help: %v: %s", err, out)
	}
}

// A program goes by the name in hack/peers, whatever go calls it.
func TestPeersAreBuiltOnceForEachModule(t *testing.T) {
	dir := t.TempDir()
	const compiler = `#!/bin/bash
echo "$@" >>"${0%/*}/calls"
while [[ $1 != -o ]]; do shift; done
for package in "${@:3}"; do
  case $package in
    go.etcd.io/etcd/server/v3) name=server ;;
    go.universe.tf/metallb/*) name=${package##*/} ;;
    k8s.io/kubernetes/cmd/*) name=${package##*/} ;;
    k8s.io/kubernetes/test/e2e) name=e2e.test ;;
    *) echo "what is $package?" >&2; exit 1 ;;
  esac
  echo "$package" >"$2$name" && chmod 755 "$2$name"
done
`
	if err := os.WriteFile(filepath.Join(dir, "go"), []byte(compiler), 0o700); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"etcd": "go.etcd.io/etcd/server/v3", "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy", "e2e.test": "k8s.io/kubernetes/test/e2e",
		"metallb-speaker": "go.universe.tf/metallb/speaker", "metallb-controller": "go.universe.tf/metallb/controller",
	}
	for range 2 { // the second finds all
		out, err := script(t, dir, "hack/peers", "etcd", "metallb-speaker", "kube-proxy", "etcd", "e2e.test", "metallb-controller").Output()
		if err != nil {
			t.Fatalf("hack/peers: %v", err)
		}
		for name, pkg := range want {
			if text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), name)); err != nil || strings.TrimSpace(string(text)) != pkg {
				t.Errorf("%s: %q, %v, want %s", name, text, err, pkg)
			}
		}
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(calls), "\n"); n != 3 { // the modules, and a test
		t.Errorf("%d calls of go, want 3:\n%s", n, calls)
	}
}
