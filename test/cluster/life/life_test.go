// Package life tests what an operator does to Spillway on a real cluster, under load: every
// lost packet of a connection and every lost new connection counts.
package life

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/cluster/programs"
	"spillway.dev/spillway/test/flows/probe"
)

var (
	cni       = flag.String("cni", string(cluster.FlannelVXLAN), "pod network of the cluster")
	proxyMode = flag.String("proxy-mode", "ebpf", "proxyMode of Spillway's chart")
	kubeProxy = flag.String("kube-proxy", "iptables", "mode of the kube-proxy to take over from: iptables, iptables-legacy or nftables")
)

func TestMain(m *testing.M) {
	probe.Main()
	flag.Parse()
	os.Exit(run(m))
}

// imageDir is for images as long as the tests run.
var imageDir string

func run(m *testing.M) int {
	var err error
	if imageDir, err = os.MkdirTemp("", "spillway-life-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(imageDir)
	return m.Run()
}

// ownImage is the archive of this tree's image.
var ownImage = sync.OnceValues(func() (string, error) { return makeImage() })

// makeImage writes an image with make's variables, and returns the archive.
func makeImage(variables ...string) (string, error) {
	root, err := programs.Root()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(imageDir, "")
	if err != nil {
		return "", err
	}
	cmd := exec.Command("make", append([]string{"-C", root, "image", "BIN=" + dir}, variables...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("make image: %w: %s", err, out)
	}
	return filepath.Join(dir, "image.tar"), nil
}

// start starts a cluster with the servers of the load.
func start(t *testing.T, proxy cluster.Proxy) (*cluster.Cluster, *load) {
	t.Helper()
	ctx := t.Context()
	archive, err := ownImage()
	must(t, err)
	c, err := cluster.Up(ctx, cluster.Config{
		Name: fmt.Sprintf("life-%06x", rand.N(1<<24)), CNI: cluster.CNI(*cni), Proxy: proxy,
		Values: []string{"proxyMode=" + *proxyMode}, Image: archive, Images: []string{"agnhost"}, Out: t.Output(),
	})
	t.Cleanup(func() {
		if t.Failed() {
			logs(t, c)
		}
		if err := c.Down(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	image, err := images.Reference("agnhost")
	must(t, err)
	must(t, c.Apply(ctx, fmt.Sprintf(peers, image, nodePort)))
	must(t, c.WaitForRollout(ctx, "default", "daemonset/peer"))
	l := startPeers(t, c)
	l.settle(t, c)
	return c, l
}

func logs(t *testing.T, c *cluster.Cluster) {
	for _, args := range [][]string{
		{"get", "pods,nodes", "--all-namespaces", "--output=wide"},
		{"logs", "--namespace=kube-system", "--selector=app.kubernetes.io/name=spillway", "--tail=40", "--prefix"},
	} {
		out, _ := c.Kubectl(context.Background(), args...)
		t.Log(out)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestSpillway takes one cluster through the life of its DaemonSet.
func TestSpillway(t *testing.T) {
	c, l := start(t, cluster.Spillway)
	next := otherVersion(t, c)
	for _, test := range []struct {
		name string
		do   func(*testing.T, *cluster.Cluster)
		// Streams that may lose questions, with the reason in a comment.
		except []string
	}{
		{name: "nothing happens", do: func(*testing.T, *cluster.Cluster) { time.Sleep(5 * time.Second) }},
		{name: "rolling upgrade", do: func(t *testing.T, c *cluster.Cluster) {
			must(t, c.InstallSpillway(t.Context(), "image.tag="+next))
			wantImage(t, c, next)
		}},
		{name: "rollback", do: func(t *testing.T, c *cluster.Cluster) {
			_, err := c.Helm(t.Context(), "rollback", "spillway", "--namespace", "kube-system", "--wait", "--timeout", "3m")
			must(t, err)
			must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
		}},
		{name: "upgrade of all nodes at once", do: func(t *testing.T, c *cluster.Cluster) {
			must(t, c.InstallSpillway(t.Context(), "image.tag="+next, "updateStrategy.rollingUpdate.maxUnavailable=100%"))
			wantImage(t, c, next)
		}},
		{name: "SIGKILL of every agent", do: killAgents},
		{name: "OOM kill of every agent", do: exhaustMemory},
		{name: "API server away", do: apiServerAway},
		{name: "node drained", do: drain},
		{name: "node deleted and added", do: deleteNode},
	} {
		ok := t.Run(test.name, func(t *testing.T) {
			l.start(t, c)
			defer l.end(t, test.except...)
			test.do(t, c)
		})
		if !ok && t.Context().Err() != nil {
			return
		}
	}
}

// otherVersion makes an image of another version, which every node imports.
func otherVersion(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	const version = "0.0.0-next"
	archive, err := makeImage("VERSION=" + version)
	must(t, err)
	must(t, c.ImportImage(t.Context(), archive))
	return version
}

func wantImage(t *testing.T, c *cluster.Cluster, tag string) {
	t.Helper()
	out, err := c.Kubectl(t.Context(), "--namespace", "kube-system", "get", "pods", "--selector=app.kubernetes.io/name=spillway",
		"--output=jsonpath={range .items[*]}{.spec.containers[0].image}{'\\n'}{end}")
	must(t, err)
	if got := strings.Count(out, ":"+tag+"\n"); got != 3 {
		t.Errorf("agents run the images %q, want three of %s", out, tag)
	}
}

// agents returns the Pods of the agents by their nodes' names.
func agents(t *testing.T, c *cluster.Cluster) map[string]*cluster.Pod {
	t.Helper()
	pods, err := c.Pods(t.Context(), "kube-system", "app.kubernetes.io/name=spillway")
	must(t, err)
	if len(pods) != 3 {
		t.Fatalf("%d agents run, want 3", len(pods))
	}
	return pods
}

func killAgents(t *testing.T, c *cluster.Cluster) {
	for _, pod := range agents(t, c) {
		must(t, pod.Kill())
	}
	waitUntil(t, "every agent is started again", func() bool {
		out, err := c.Kubectl(t.Context(), "--namespace", "kube-system", "get", "pods", "--selector=app.kubernetes.io/name=spillway",
			"--output=jsonpath={range .items[*]}{.status.containerStatuses[0].restartCount}{.status.containerStatuses[0].ready} {end}")
		return err == nil && strings.Count(out, "true ") == 3 && !strings.Contains(out, "0true")
	})
}

func waitUntil(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !done(); time.Sleep(500 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it is not so after two minutes: %s", what)
		}
	}
}

func apiServerAway(t *testing.T, c *cluster.Cluster) {
	c.ControlPlane().StopAPIServer()
	away := time.Minute
	if testing.Short() {
		away = 15 * time.Second
	}
	time.Sleep(away)
	must(t, c.ControlPlane().StartAPIServer(t.Context()))
	must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
}

func drain(t *testing.T, c *cluster.Cluster) {
	for _, args := range [][]string{
		{"drain", "node2", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=1m"},
		{"uncordon", "node2"},
	} {
		_, err := c.Kubectl(t.Context(), args...)
		must(t, err)
	}
}

func deleteNode(t *testing.T, c *cluster.Cluster) {
	node := c.Node(2)
	node.StopKubelet()
	_, err := c.Kubectl(t.Context(), "delete", "node", node.Name(), "--timeout=1m")
	must(t, err)
	waitUntil(t, "the node's Pods are deleted", func() bool {
		out, err := c.Kubectl(t.Context(), "get", "pods", "--all-namespaces", "--field-selector=spec.nodeName="+node.Name(), "--output=name")
		return err == nil && out == ""
	})
	must(t, node.StartKubelet(t.Context()))
	_, err = c.Kubectl(t.Context(), "wait", "node/"+node.Name(), "--for=condition=Ready", "--timeout=2m")
	must(t, err)
	must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
}
