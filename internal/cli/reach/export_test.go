package reach

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// FakeCluster is the fake API server for tests of commands.
type FakeCluster struct {
	*apiServer
	t *testing.T
}

// NewFakeCluster starts a cluster without nodes.
func NewFakeCluster(t *testing.T) FakeCluster { return FakeCluster{newAPIServer(t), t} }

// Kubeconfig writes a kubeconfig of the cluster.
func (c FakeCluster) Kubeconfig() string {
	c.t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["fake"] = &clientcmdapi.Cluster{Server: c.URL}
	config.Contexts["fake"] = &clientcmdapi.Context{Cluster: "fake"}
	config.CurrentContext = "fake"
	file := filepath.Join(c.t.TempDir(), "kubeconfig")
	text, err := clientcmd.Write(*config)
	if err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return file
}

// Agent adds a node with an agent.
func (c FakeCluster) Agent(node string, api nodev1alpha1connect.NodeServiceHandler) {
	c.add(node, pipeTo(c.t, api))
}

// Old adds a node whose agent has no api-pipe.
func (c FakeCluster) Old(node string) {
	c.add(node, failing(`spillway: unknown command "api-pipe"`, exitUsage))
}

// Hanging adds a node whose kubelet hangs.
func (c FakeCluster) Hanging(node string) {
	c.add(node, func(ctx context.Context, _ io.Reader, _, _ io.Writer) int {
		<-ctx.Done()
		return 1
	})
}

// Bare adds a node without an agent.
func (c FakeCluster) Bare(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes = append(c.nodes, node)
}

// Delete deletes a node with its agent.
func (c FakeCluster) Delete(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes = slices.DeleteFunc(c.nodes, func(n string) bool { return n == node })
	c.pods = slices.DeleteFunc(c.pods, func(p corev1.Pod) bool { return p.Spec.NodeName == node })
}

// Deny refuses requests: "RESOURCE NAMESPACE", "nodes", "exec".
func (c FakeCluster) Deny(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.denied[what] = true
}

// Execs returns how many execs run.
func (c FakeCluster) Execs() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running
}

// Command sets what an exec of a command for a client runs, by node.
func (c FakeCluster) Command(run func(node string, args []string, stdin io.Reader, stdout, stderr io.Writer) int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.command = run
}
