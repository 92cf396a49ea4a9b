// Package life tests what an operator does to Spillway on a real cluster, under load: every
// lost packet of a connection and every lost new connection counts.
package life

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/images"
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
	os.Exit(clustertest.Main(m))
}

// start starts a cluster with peers on node0 and node1, and the load's askers.
func start(t *testing.T, proxy cluster.Proxy) (*cluster.Cluster, *load) {
	t.Helper()
	values := []string{"proxyMode=" + *proxyMode, "egress.mode=auto"}
	cfg := cluster.Config{CNI: cluster.CNI(*cni), Proxy: proxy, Values: values, Images: []string{"agnhost"}}
	if proxy == cluster.Spillway { // for dsrReplies
		cfg.Families, cfg.Images = cluster.Dual, append(cfg.Images, images.MetalLB...)
	}
	c := clustertest.Start(t, "life", cfg)
	clustertest.StartPeers(t, c, "peer", "node2")
	l := startAskers(t, c)
	l.settle(t, c)
	return c, l
}

// TestSpillway takes one cluster through the life of its DaemonSet, from upgrades to the
// end and a new start.
func TestSpillway(t *testing.T) {
	c, l := start(t, cluster.Spillway)
	next := otherVersion(t, c)
	for _, test := range []struct {
		name   string
		before func(*testing.T, *cluster.Cluster) // without load
		do     func(*testing.T, *cluster.Cluster)
		ebpf   bool // of this dataplane alone
		// Streams that cannot survive it, or may lose questions, with the reason in a comment.
		without []string
		except  []excuse
	}{
		{name: "nothing happens", do: func(*testing.T, *cluster.Cluster) { time.Sleep(5 * time.Second) }},
		{name: "a viewer asks all agents", do: viewerAsks},
		{name: "an administrator debugs a node", do: debugNode},
		{name: "rolling upgrade", do: func(t *testing.T, c *cluster.Cluster) {
			clustertest.Must(t, c.InstallSpillway(t.Context(), "image.tag="+next))
			wantImage(t, c, next)
		}},
		{name: "rollback", do: func(t *testing.T, c *cluster.Cluster) {
			_, err := c.Helm(t.Context(), "rollback", "spillway", "1", "--namespace", "kube-system", "--wait", "--timeout", "3m")
			clustertest.Must(t, err)
			clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
		}},
		{name: "upgrade of all nodes at once", do: func(t *testing.T, c *cluster.Cluster) {
			clustertest.Must(t, c.InstallSpillway(t.Context(), "image.tag="+next, "updateStrategy.rollingUpdate.maxUnavailable=100%"))
			wantImage(t, c, next)
		}},
		{name: "SIGKILL of every agent", do: killAgents},
		{name: "OOM kill of every agent", do: exhaustMemory},
		{name: "API server away", do: apiServerAway},
		{name: "egress off, and on again", do: switchEgress},
		{name: "node drained", before: startMovers, do: func(t *testing.T, c *cluster.Cluster) { drain(t, c, l) },
			// With eBPF it stays with its endpoint: docs/reference/limits.md. drain has another.
			without: []string{"udp from node1"},
			except:  []excuse{movedSocket}},
		{name: "DSR replies", do: func(t *testing.T, c *cluster.Cluster) { dsrReplies(t, c, l) }, ebpf: true},
		{name: "optional parts", do: func(t *testing.T, c *cluster.Cluster) { optionalParts(t, c, l) }},
		{name: "node deleted and added", do: deleteNode},
	} {
		if test.ebpf && *proxyMode != "ebpf" {
			continue
		}
		ok := t.Run(test.name, func(t *testing.T) {
			if test.before != nil {
				test.before(t, c)
			}
			l.start(t, c, test.without...)
			defer l.end(t, test.except...)
			test.do(t, c)
		})
		if !ok && t.Context().Err() != nil {
			return
		}
	}
	readiness(t, c, l)
}

// movedSocket is for UDP sockets that keep their port: they move to another endpoint when
// their own no longer serves, and lose what is on the way.
var movedSocket = excuse{streams: "udp from", most: 5, moved: true}

// otherVersion makes an image of another version, which every node imports.
func otherVersion(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	const version = "0.0.0-next"
	clustertest.Must(t, c.ImportImage(t.Context(), filepath.Join(clustertest.Image(t, "VERSION="+version), "image.tar")))
	return version
}

func wantImage(t *testing.T, c *cluster.Cluster, tag string) {
	t.Helper()
	out, err := c.Kubectl(t.Context(), "--namespace", "kube-system", "get", "pods", "--selector=app.kubernetes.io/name=spillway",
		"--output=jsonpath={range .items[*]}{.spec.containers[0].image}{'\\n'}{end}")
	clustertest.Must(t, err)
	if got := strings.Count(out, ":"+tag+"\n"); got != 3 {
		t.Errorf("agents run the images %q, want three of %s", out, tag)
	}
}

// agents returns the Pods of the agents by their nodes' names.
func agents(t *testing.T, c *cluster.Cluster) map[string]*cluster.Pod {
	t.Helper()
	pods, err := c.PodOfEachNode(t.Context(), "kube-system", "app.kubernetes.io/name=spillway")
	clustertest.Must(t, err)
	if len(pods) != 3 {
		t.Fatalf("%d agents run, want 3", len(pods))
	}
	return pods
}

func killAgents(t *testing.T, c *cluster.Cluster) {
	for _, pod := range agents(t, c) {
		clustertest.Must(t, pod.Kill())
	}
	await.True(t, "every agent is started again", func() bool {
		out, err := c.Kubectl(t.Context(), "--namespace", "kube-system", "get", "pods", "--selector=app.kubernetes.io/name=spillway",
			"--output=jsonpath={range .items[*]}{.status.containerStatuses[0].restartCount}{.status.containerStatuses[0].ready} {end}")
		return err == nil && strings.Count(out, "true ") == 3 && !strings.Contains(out, "0true")
	})
}

// later is a Pod and its Service that are new after the API server was away.
const later = `
apiVersion: v1
kind: Pod
metadata: {name: later, labels: {app: later}}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: later, image: %s, imagePullPolicy: Never, args: [netexec]}]
---
apiVersion: v1
kind: Service
metadata: {name: later}
spec:
  type: NodePort
  selector: {app: later}
  ports: [{port: 80, targetPort: 8080, nodePort: %d}]
`

const laterNodePort = 30083

// apiServerAway waits until all of the cluster has noticed that the API server is back:
// controllers and agents try again after up to half a minute.
func apiServerAway(t *testing.T, c *cluster.Cluster) {
	c.ControlPlane().StopAPIServer()
	away := time.Minute
	if testing.Short() {
		away = 15 * time.Second
	}
	time.Sleep(away)
	clustertest.Must(t, c.ControlPlane().StartAPIServer(t.Context()))
	image, err := images.Reference("agnhost")
	clustertest.Must(t, err)
	clustertest.Must(t, c.Apply(t.Context(), fmt.Sprintf(later, image, laterNodePort)))
	for i, n := range c.AllNodes() {
		await.True(t, "a new Service answers at "+n.Name(), func() bool {
			return get(t, c, i, laterNodePort, "/hostname") == http.StatusOK
		})
	}
	kubectl(t, c, "delete", "pod/later", "service/later", "--namespace=default")
}

func deleteNode(t *testing.T, c *cluster.Cluster) {
	node := c.Node(2)
	node.StopKubelet()
	_, err := c.Kubectl(t.Context(), "delete", "node", node.Name(), "--timeout=1m")
	clustertest.Must(t, err)
	if testing.Short() { // else the controller does it, a minute later
		_, err = c.Kubectl(t.Context(), "delete", "pods", "--all-namespaces", "--field-selector=spec.nodeName="+node.Name(), "--force")
		clustertest.Must(t, err)
	}
	await.True(t, "the node's Pods are deleted", func() bool {
		out, err := c.Kubectl(t.Context(), "get", "pods", "--all-namespaces", "--field-selector=spec.nodeName="+node.Name(), "--output=name")
		return err == nil && out == ""
	})
	clustertest.Must(t, node.StartKubelet(t.Context()))
	_, err = c.Kubectl(t.Context(), "wait", "node/"+node.Name(), "--for=condition=Ready", "--timeout=2m")
	clustertest.Must(t, err)
	clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
}
