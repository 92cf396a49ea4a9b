// Package kubeadm runs the commands of docs/tutorials/kubeadm.md as written, on clusters that
// kubeadm makes.
package kubeadm

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/e2e"
	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/cluster/programs"
)

var cni = flag.String("cni", string(cluster.FlannelVXLAN), "pod network of the clusters")

// The headings whose commands each test runs.
var (
	newCluster     = []string{"", "A new cluster"}
	runningCluster = []string{"", "Beside kube-proxy", "Replace a running kube-proxy", "One node after the other", "Back"}
)

func TestMain(m *testing.M) { os.Exit(clustertest.Main(m)) }

func TestNewCluster(t *testing.T) {
	skipShort(t)
	var d *document
	c := start(t, func(ctx context.Context, c *cluster.Cluster) error {
		d = values(t, c)
		if err := kubeadmInit(c, d.block("A new cluster", 0)); err != nil {
			return err
		}
		_, err := c.Node(0).Script(ctx, d.block("A new cluster", 1))
		return err
	})
	w := serveWeb(t, c)
	w.wantAnswers(t, c)
	upgrade(t, c)
	if out := run(t, c, "kubectl get daemonsets -A -o name"); strings.Contains(out, "kube-proxy") {
		t.Error("kubeadm upgrade installed kube-proxy")
	}
	w.wantAnswers(t, c)
	conformance(t, c)
	d.wantAllUsed(newCluster...)
}

// conformance runs Kubernetes' conformance tests of Services. Pods may run on both nodes.
func conformance(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	run(t, c, "kubectl taint node "+c.Node(0).Name()+" node-role.kubernetes.io/control-plane-")
	dir, err := programs.Build(t.Context(), t.Output(), e2e.Programs...)
	clustertest.Must(t, err)
	report, err := e2e.Run(t.Context(), e2e.Config{
		Kubeconfig: cluster.Kubeconfig(c.Name), Programs: dir, Dir: filepath.Join(t.ArtifactDir(), "report"),
		Label: "ebpf", Focus: e2e.Conformance, Nodes: len(c.AllNodes()),
		Exec: func(ctx context.Context, out io.Writer, argv ...string) error {
			cmd := c.Client().Command(ctx, argv...)
			cmd.Stdout, cmd.Stderr = out, out
			return cmd.Run()
		},
	})
	clustertest.Must(t, err)
	t.Log("\n" + e2e.Table(report))
	expected, err := e2e.ExpectedFailures()
	clustertest.Must(t, err)
	clustertest.Must(t, report.Check(expected))
}

func TestRunningCluster(t *testing.T) {
	skipShort(t)
	var d *document
	c := start(t, func(ctx context.Context, c *cluster.Cluster) error {
		d = values(t, c)
		if err := kubeadmInit(c, "{apiVersion: kubeadm.k8s.io/v1beta4, kind: InitConfiguration}"); err != nil {
			return err
		}
		_, err := c.Node(0).Script(ctx, "kubeadm init --config kubeadm.yaml")
		return err
	})
	w := serveWeb(t, c)
	w.wantAnswers(t, c)

	beside(t, c, d, w)
	replace(t, c, d, w)
	back(t, c, d, w, 0)
	nodeByNode(t, c, d, w)
	back(t, c, d, w, 1)
	d.wantAllUsed(runningCluster...)
}

func beside(t *testing.T, c *cluster.Cluster, d *document, w *web) {
	run(t, c, d.block("Beside kube-proxy", 0))
	await.True(t, "kube-proxy has left the Service", func() bool { return !strings.Contains(rules(t, c, 1), `"default/web`) })
	w.wantAnswers(t, c)
	run(t, c, d.block("Beside kube-proxy", 1))
	await.True(t, "kube-proxy serves it again", func() bool { return strings.Contains(rules(t, c, 1), `"default/web`) })
	w.wantAnswers(t, c)
}

func replace(t *testing.T, c *cluster.Cluster, d *document, w *web) {
	const heading = "Replace a running kube-proxy"
	steps := stepsOf(t, d.block(heading, 0), 4)
	w.ask(t, c)
	run(t, c, steps[0])
	run(t, c, steps[1])
	await.True(t, "each agent took over", func() bool {
		out, _ := c.Node(0).Script(t.Context(), steps[2])
		return strings.Count(out, "\n") == 2
	})
	run(t, c, steps[3])
	w.wantNoLoss(t)
	w.wantAnswers(t, c)
	wantKubeProxyRules(t, c, false)

	run(t, c, d.block(heading, 1))
	upgrade(t, c)
	if n := kubeProxies(t, c); n != 0 {
		t.Errorf("after kubeadm upgrade, %d Pods of kube-proxy are wanted", n)
	}
	w.wantAnswers(t, c)
}

func nodeByNode(t *testing.T, c *cluster.Cluster, d *document, w *web) {
	const heading = "One node after the other"
	w.ask(t, c)
	run(t, c, d.block(heading, 0))
	for i, n := range c.AllNodes() {
		run(t, c, strings.ReplaceAll(d.block(heading, 1), "NODE", n.Name()))
		await.True(t, "the agent on "+n.Name()+" took over", func() bool { return !strings.Contains(rules(t, c, i), "KUBE-SVC-") })
		if want, got := len(c.AllNodes())-1-i, kubeProxies(t, c); got != want {
			t.Errorf("after %s, %d Pods of kube-proxy are wanted, not %d", n.Name(), got, want)
		}
	}
	w.wantNoLoss(t)
	w.wantAnswers(t, c)
}

// back goes back to kube-proxy. variant is the block with step 2.
func back(t *testing.T, c *cluster.Cluster, d *document, w *web, variant int) {
	first := stepsOf(t, d.block("Back", 0), 2)
	w.ask(t, c)
	run(t, c, first[0])
	run(t, c, []string{first[1], d.block("Back", 1)}[variant])
	for _, n := range c.AllNodes() {
		await.True(t, "kube-proxy on "+n.Name()+" has written its rules", func() bool {
			out, err := n.Script(t.Context(), d.block("Back", 2))
			return err == nil && !strings.Contains(out, " 0\n")
		})
	}
	run(t, c, d.block("Back", 3))
	w.wantNoLoss(t)
	w.wantAnswers(t, c)
	wantKubeProxyRules(t, c, true)
	for _, n := range c.AllNodes() {
		// The kernel itself puts maps.debug and progs.debug there.
		left, err := n.Command(t.Context(), "bash", "-euc",
			"find /sys/fs/bpf /run/spillway -mindepth 1 ! -name '*.debug'; nft list tables | grep spillway || true").Output()
		clustertest.Must(t, err)
		if len(left) > 0 {
			t.Errorf("the cleanup left on %s: %s", n.Name(), left)
		}
	}
	if out := run(t, c, "kubectl -n kube-system get configmap kubeadm-config -o yaml"); !strings.Contains(out, "\n    proxy: {}\n") {
		t.Errorf("kubeadm's configuration is not as before: %s", out)
	}
}

// stepsOf cuts a block before each comment that starts with a number.
func stepsOf(t *testing.T, block string, want int) []string {
	t.Helper()
	steps := regexp.MustCompile(`(?m)^# \d\. `).Split(block, -1)[1:]
	for i := range steps {
		steps[i] = "# " + steps[i]
	}
	if len(steps) != want {
		t.Fatalf("docs/tutorials/kubeadm.md: a block has %d steps, want %d:\n%s", len(steps), want, block)
	}
	return steps
}

// values reads the document and writes its values on the first node.
func values(t *testing.T, c *cluster.Cluster) *document {
	t.Helper()
	d := read(t, "REGISTRY", "docker.io/library", "ENDPOINT", c.APIServer())
	run(t, c, d.block("", 0)+"echo 'cgroupRoot: /sys/fs/cgroup/unified' >>spillway.yaml\n") // beside cgroup v1
	return d
}

// kubeadmInit writes kubeadm.yaml with an InitConfiguration.
func kubeadmInit(c *cluster.Cluster, init string) error {
	var config map[string]any
	if err := yaml.UnmarshalStrict([]byte(init), &config); err != nil {
		return err
	}
	text, err := c.KubeadmConfig(config)
	if err != nil {
		return err
	}
	return c.Node(0).WriteFile("kubeadm.yaml", text)
}

// upgrade upgrades the control plane to the version that it has.
func upgrade(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	version := run(t, c, "kubeadm version -o short")
	run(t, c, "kubeadm upgrade apply --yes --force --ignore-preflight-errors=SystemVerification "+version)
}

func kubeProxies(t *testing.T, c *cluster.Cluster) (n int) {
	t.Helper()
	out := run(t, c, "kubectl -n kube-system get daemonset kube-proxy -o jsonpath='{.status.desiredNumberScheduled}'")
	_, err := fmt.Sscan(out, &n)
	clustertest.Must(t, err)
	return n
}

// rules returns the rules of iptables on a node.
func rules(t *testing.T, c *cluster.Cluster, node int) string {
	t.Helper()
	out, err := c.Node(node).Command(t.Context(), "iptables-nft-save").Output()
	clustertest.Must(t, err)
	return string(out)
}

func wantKubeProxyRules(t *testing.T, c *cluster.Cluster, want bool) {
	t.Helper()
	for i, n := range c.AllNodes() {
		if strings.Contains(rules(t, c, i), "KUBE-SVC-") != want {
			t.Errorf("%s has kube-proxy's rules: %v, want %v", n.Name(), !want, want)
		}
	}
}

// web is a Service, and a client outside the cluster that asks it with a new connection
// each time.
type web struct {
	client      *http.Client
	stop        context.CancelFunc
	done        chan struct{} // closed when it no longer asks
	asked, lost int           // of the last ask
	err         error         // of the last lost question
}

func serveWeb(t *testing.T, c *cluster.Cluster) *web {
	t.Helper()
	clustertest.StartPeers(t, c, "web", "")
	return &web{client: &http.Client{
		Timeout:   2 * time.Second,
		Transport: &http.Transport{DialContext: c.Client().Dial, DisableKeepAlives: true},
	}}
}

// wantAnswers asks at each node from outside, and each node asks by the ClusterIP.
func (w *web) wantAnswers(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	for _, n := range c.AllNodes() {
		await.True(t, "the Service answers at "+n.Name(), func() bool { return w.get(t.Context(), n) == nil })
		await.True(t, "the Service answers on "+n.Name(), func() bool {
			return n.Command(t.Context(), "curl", "--silent", "--fail", "--max-time", "2", "http://"+clustertest.ClusterIP+"/hostname").Run() == nil
		})
	}
}

func (w *web) get(ctx context.Context, n *cluster.Node) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s:%d/hostname", n.Host().IPv4, clustertest.NodePort), nil)
	if err != nil {
		return err
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// ask asks all nodes in turn until wantNoLoss.
func (w *web) ask(t *testing.T, c *cluster.Cluster) {
	ctx, stop := context.WithCancel(t.Context())
	w.stop, w.done = stop, make(chan struct{})
	w.asked, w.lost = 0, 0
	go func() {
		defer close(w.done)
		for ctx.Err() == nil {
			for _, n := range c.AllNodes() {
				w.asked++
				if err := w.get(context.WithoutCancel(ctx), n); err != nil {
					w.lost++
					w.err = fmt.Errorf("%s: %w", time.Now().Format(time.TimeOnly), err)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
}

func (w *web) wantNoLoss(t *testing.T) {
	t.Helper()
	w.stop()
	<-w.done
	t.Logf("%d of %d questions were lost", w.lost, w.asked)
	if w.lost > 0 {
		t.Errorf("a question was lost at %v", w.err)
	}
}

// start starts two nodes. init makes the first.
func start(t *testing.T, init func(context.Context, *cluster.Cluster) error) *cluster.Cluster {
	t.Helper()
	return clustertest.Start(t, "kubeadm", cluster.Config{
		Nodes: 2, CNI: cluster.CNI(*cni), Kubeadm: true, KubeadmInit: init, Images: images.Tests,
	})
}

func skipShort(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: this takes several minutes")
	}
}

// run runs a script on the first node.
func run(t *testing.T, c *cluster.Cluster, script string) string {
	t.Helper()
	out, err := c.Node(0).Script(t.Context(), script)
	clustertest.Must(t, err)
	return out
}
