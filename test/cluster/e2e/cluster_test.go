package e2e_test

import (
	"context"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/e2e"
	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/cluster/programs"
)

var (
	cni   = flag.String("cni", string(cluster.FlannelVXLAN), "pod network of the cluster")
	proxy = flag.String("proxy", "ebpf", "mode of Spillway, or kube-proxy-iptables, or kube-proxy-nftables")

	families = flag.String("families", string(cluster.IPv4), "address families of the cluster: ipv4, ipv6 or dual")
)

func TestMain(m *testing.M) { os.Exit(clustertest.Main(m)) }

// TestKubernetesOwnTests runs All tests; with -short, the Conformance tests.
func TestKubernetesOwnTests(t *testing.T) {
	ctx := t.Context()
	expected, err := e2e.ExpectedFailures()
	clustertest.Must(t, err)
	dir, err := programs.Build(ctx, t.Output(), e2e.Programs...)
	clustertest.Must(t, err)
	cfg := cluster.Config{
		CNI: cluster.CNI(*cni), Proxy: cluster.Proxy(*proxy), Families: cluster.Families(*families), Images: images.Tests,
	}
	switch *proxy {
	case "ebpf", "nftables", "iptables":
		cfg.Proxy, cfg.Values = cluster.Spillway, []string{"proxyMode=" + *proxy}
	}
	c := clustertest.Start(t, "e2e", cfg)
	run := e2e.Config{
		Kubeconfig: cluster.Kubeconfig(c.Name), Programs: dir, Dir: filepath.Join(t.ArtifactDir(), "report"),
		Label: *proxy, CNI: *cni, Focus: e2e.All, Exec: onClient(c),
	}
	if testing.Short() {
		run.Focus = e2e.Conformance
	}
	if cfg.Families != cluster.IPv4 {
		run.Label += "-" + *families
	}
	if cfg.Families == cluster.Dual {
		run.Focus = run.Focus.WithDualStack()
	}
	report, err := e2e.Run(ctx, run)
	clustertest.Must(t, err)
	t.Log("\n" + e2e.Table(report))
	for _, state := range []e2e.State{e2e.Passed, e2e.Failed, e2e.Skipped} { // for cmd/matrix
		n := 0
		for _, test := range report.Tests {
			if test.State == state {
				n++
			}
		}
		t.Attr(string(state), strconv.Itoa(n))
	}
	clustertest.Must(t, report.Check(expected))
}

// onClient runs the tests outside the cluster, where an operator is.
func onClient(c *cluster.Cluster) func(context.Context, io.Writer, ...string) error {
	return func(ctx context.Context, out io.Writer, argv ...string) error {
		cmd := c.Client().Command(ctx, argv...)
		cmd.Stdout, cmd.Stderr = out, out
		return cmd.Run()
	}
}
