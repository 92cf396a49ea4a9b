// Package controlplane tests the code that uses Kubernetes with the real programs: etcd,
// kube-apiserver and kube-controller-manager. test/testbed/controlplane starts them, and the tests
// of this package share them.
package controlplane

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"

	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/workload"
)

// shared serves the tests that leave the API server alone.
var shared *controlplane.ControlPlane

// sharedDir is there as long as the tests are.
var sharedDir string

// binary builds the agent, once.
var binary = sync.OnceValues(func() (string, error) { return cluster.Build(context.Background(), sharedDir, "") })

// asInClusters holds the flags with which both kubeadm and k3s start their API server.
// The chart's DaemonSet needs them.
var asInClusters = []string{"--allow-privileged"}

func TestMain(m *testing.M) {
	workload.RunIfAsked()
	if dir := os.Getenv(orphanVariable); dir != "" {
		startOrphans(dir)
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	dir, err := makeDir()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	sharedDir = dir
	if shared, err = controlplane.Up(context.Background(), controlplane.Config{Dir: dir, APIServerArgs: asInClusters}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer shared.Down()
	return m.Run()
}

// makeDir creates a directory in memory if possible: etcd waits for every write.
func makeDir() (string, error) {
	if dir, err := os.MkdirTemp("/dev/shm", "spillway-test-"); err == nil {
		return dir, nil
	}
	return os.MkdirTemp("", "spillway-test-")
}

// client returns a client that may do everything.
func client(t testing.TB, c *controlplane.ControlPlane) *kubernetes.Clientset {
	t.Helper()
	k, err := kubernetes.NewForConfig(c.REST())
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// removeAtEnd removes a directory when the test and its control plane are done.
func removeAtEnd(t *testing.T, dir string) {
	t.Helper()
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
}
