// Package clustertest has what the tests on real clusters share: the cluster of a test,
// and peers, the servers that tests ask.
package clustertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/programs"
)

// built are the directories of the images that this process has made.
var built = struct {
	sync.Mutex
	parent string
	dirs   map[string]string // by make's variables
}{dirs: map[string]string{}}

// Main runs the tests of a package and removes the images that they made. TestMain
// returns its result to os.Exit.
func Main(m *testing.M) int {
	defer func() { _ = os.RemoveAll(built.parent) }()
	return m.Run()
}

// Image makes this tree's image with make's variables, and returns the directory with
// image.tar and with the OCI layout, image. It makes each image once.
func Image(t *testing.T, variables ...string) string {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	key := strings.Join(variables, " ")
	if dir := built.dirs[key]; dir != "" {
		return dir
	}
	root, err := programs.Root()
	Must(t, err)
	if built.parent == "" {
		built.parent, err = os.MkdirTemp("", "spillway-images-")
		Must(t, err)
	}
	dir, err := os.MkdirTemp(built.parent, "")
	Must(t, err)
	cmd := exec.CommandContext(t.Context(), "make", append([]string{"-C", root, "image", "BIN=" + dir}, variables...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make image: %v: %s", err, out)
	}
	built.dirs[key] = dir
	return dir
}

// Start starts a cluster whose name begins with the prefix, with this tree's image, and
// removes it at the end of the test. Nodes, Pods and the agents' log are the last lines
// of a test that failed.
func Start(t *testing.T, prefix string, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	cfg.Name, cfg.Out = fmt.Sprintf("%s-%06x", prefix, rand.N(1<<24)), t.Output()
	cfg.Image = filepath.Join(Image(t), "image.tar")
	t.Attr("cluster", cfg.Name) // cmd/matrix reports it if it is left
	c, err := cluster.Up(t.Context(), cfg)
	t.Cleanup(func() {
		if t.Failed() {
			for _, args := range [][]string{
				{"get", "pods,nodes", "--all-namespaces", "--output=wide"},
				{"logs", "--namespace=kube-system", "--selector=app.kubernetes.io/name=spillway", "--tail=40", "--prefix"},
			} {
				out, _ := c.Kubectl(context.Background(), args...)
				t.Log(out)
			}
		}
		if err := c.Down(); err != nil {
			t.Error(err)
		}
	})
	Must(t, err)
	return c
}

// Must ends the test if there is an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
