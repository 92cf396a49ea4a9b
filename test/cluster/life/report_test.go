package life

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// planted is a secret that no archive may have.
const planted = "planted-7Kx2vQ9w"

// secrets are objects with the secret, and an account that may read what sysdump reads.
const secrets = `
apiVersion: v1
kind: Secret
metadata: {name: spillway-planted, namespace: kube-system}
stringData: {token: %[1]s}
---
apiVersion: v1
kind: Service
metadata: {name: planted, namespace: default, annotations: {example.com/note: %[1]s}}
spec:
  clusterIP: None
  ports: [{port: 80}]
---
apiVersion: v1
kind: Event
metadata: {name: spillway-planted, namespace: kube-system}
involvedObject: {kind: Secret, name: spillway-planted, namespace: kube-system}
type: Normal
reason: Planted
message: "asked with Authorization: Bearer %[1]s and password=%[1]s"
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: reporter, namespace: default}
`

// reportsABug writes archives with 'spillway sysdump': as root on a node, with the rights
// that docs name, and outside the cluster, with a viewer's.
func reportsABug(t *testing.T, c *cluster.Cluster, program, viewer string) {
	t.Helper()
	clustertest.Must(t, c.Apply(t.Context(), fmt.Sprintf(secrets, planted)))
	defer kubectl(t, c, "delete", "service/planted", "serviceaccount/reporter", "--namespace=default")
	defer kubectl(t, c, "delete", "secret/spillway-planted", "event/spillway-planted")
	shell(t, c, cluster.Kubeconfig(c.Name), block(t, "reference/sysdump.md", "create clusterrole ", "--group=on-call",
		"--serviceaccount=default:reporter"))
	defer kubectl(t, c, "delete", "clusterrole/spillway-sysdump", "clusterrolebinding/spillway-sysdump")
	defer kubectl(t, c, "delete", "rolebinding/spillway-sysdump", "--namespace=kube-system")

	reporter, file := kubeconfig(t, c, "reporter"), filepath.Join(t.TempDir(), "node0.tar.gz")
	cmd := c.Node(0).Command(t.Context(), program, "sysdump", "--objects", "--file", file)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+reporter, "PLANTED_TOKEN="+planted)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("sysdump on a node: %v: %s", err, out)
	}
	files := archive(t, file, reporter)
	want := []string{"node/metrics.txt", "node/doctor.json", "node/agent.log", "node/api/status.json", "cluster/agents.json",
		"cluster/services.jsonl"}
	for _, n := range c.AllNodes() {
		dir := "cluster/agents/" + n.Name()
		want = append(want, dir+".log", dir+"/status.json", dir+"/drops.json", dir+"/findings.json", dir+"/services.jsonl")
		if !strings.Contains(files["cluster/nodes.json"], fmt.Sprintf(`"name": %q`, n.Name())) {
			t.Errorf("cluster/nodes.json lacks %s", n.Name())
		}
	}
	for _, name := range want {
		if files[name] == "" {
			t.Errorf("sysdump on a node: %s is empty or missing", name)
		}
	}
	if !strings.Contains(files["cluster/events.json"], `"reason": "Planted"`) ||
		!strings.Contains(files["cluster/services.jsonl"], `"name":"planted"`) {
		t.Error("sysdump on a node: what has the secret is missing")
	}
	for _, name := range unread(t, files) {
		if *proxyMode == "ebpf" || !strings.HasPrefix(name, "node/maps/") {
			t.Errorf("sysdump on a node: not read: %s", name)
		}
	}

	file = filepath.Join(t.TempDir(), "viewer.tar.gz")
	if out, errs, err := run(t, c, viewer, program, "sysdump", "--node=false", "--file", file); err != nil {
		t.Fatalf("sysdump of a viewer: %v: %s%s", err, out, errs)
	}
	files = archive(t, file, viewer)
	// A viewer has no right to logs.
	failed := slices.DeleteFunc(unread(t, files), func(name string) bool {
		return strings.HasPrefix(name, "cluster/agents/") && strings.HasSuffix(name, ".log")
	})
	slices.Sort(failed)
	if files["cluster/nodes.json"] == "" || !strings.Contains(files["cluster/agents.json"], "spillway") ||
		files["cluster/agents/"+c.Node(0).Name()+"/status.json"] == "" ||
		!slices.Equal(failed, []string{"cluster/counts.json", "cluster/events.json"}) {
		t.Errorf("sysdump of a viewer: not read: %v", failed)
	}
}

// archive returns the files of an archive. It has neither the planted secret nor the token
// of a kubeconfig.
func archive(t *testing.T, file, kubeconfig string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	clustertest.Must(t, err)
	defer f.Close()
	unpacked, err := gzip.NewReader(f)
	clustertest.Must(t, err)
	config, err := os.ReadFile(kubeconfig)
	clustertest.Must(t, err)
	_, token, _ := strings.Cut(string(config), "token: ")
	token, _, _ = strings.Cut(token, "\n")
	files := map[string]string{}
	for r := tar.NewReader(unpacked); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		clustertest.Must(t, err)
		text, err := io.ReadAll(r)
		clustertest.Must(t, err)
		_, name, _ := strings.Cut(path.Clean(h.Name), "/") // without the archive's directory
		files[name] = string(text)
		for _, secret := range []string{planted, token} {
			if secret == "" || strings.Contains(string(text), secret) {
				t.Errorf("%s has the secret %q", h.Name, secret)
			}
		}
	}
}

// unread returns the files that the index of an archive calls incomplete or missing.
func unread(t *testing.T, files map[string]string) (names []string) {
	t.Helper()
	var index struct {
		Files []struct{ File, Error string }
	}
	clustertest.Must(t, json.Unmarshal([]byte(files["index.json"]), &index))
	for _, f := range index.Files {
		if f.Error != "" {
			t.Logf("%s: %s", f.File, f.Error)
			names = append(names, f.File)
		}
	}
	return names
}
