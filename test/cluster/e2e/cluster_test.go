package e2e_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/e2e"
	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/cluster/programs"
)

var (
	cni   = flag.String("cni", string(cluster.FlannelVXLAN), "pod network of the cluster")
	proxy = flag.String("proxy", "ebpf", "mode of Spillway, or kube-proxy-iptables, or kube-proxy-nftables")

	families = flag.String("families", string(cluster.IPv4), "address families of the cluster: ipv4, ipv6 or dual")
)

// TestKubernetesOwnTests runs All tests; with -short, the Conformance tests.
func TestKubernetesOwnTests(t *testing.T) {
	ctx := t.Context()
	expected, err := e2e.ExpectedFailures()
	must(t, err)
	root, err := programs.Root()
	must(t, err)
	bin := t.TempDir()
	if out, err := exec.CommandContext(ctx, "make", "-C", root, "image", "BIN="+bin).CombinedOutput(); err != nil {
		t.Fatalf("make image: %v: %s", err, out)
	}
	dir, err := programs.Build(ctx, t.Output(), e2e.Programs...)
	must(t, err)
	cfg := cluster.Config{
		Name: fmt.Sprintf("e2e-%06x", rand.N(1<<24)), CNI: cluster.CNI(*cni), Proxy: cluster.Proxy(*proxy),
		Families: cluster.Families(*families),
		Image:    filepath.Join(bin, "image.tar"), Images: images.Tests, Out: t.Output(),
	}
	switch *proxy {
	case "ebpf", "nftables", "iptables":
		cfg.Proxy, cfg.Values = cluster.Spillway, []string{"proxyMode=" + *proxy}
	}
	c, err := cluster.Up(ctx, cfg)
	if c != nil {
		t.Cleanup(func() {
			if err := c.Down(); err != nil {
				t.Error(err)
			}
		})
	}
	must(t, err)
	run := e2e.Config{
		Kubeconfig: cluster.Kubeconfig(cfg.Name), Programs: dir, Dir: filepath.Join(t.ArtifactDir(), "report"),
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
	must(t, err)
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
	must(t, report.Check(expected))
}

// onClient runs the tests outside the cluster, where an operator is.
func onClient(c *cluster.Cluster) func(context.Context, io.Writer, ...string) error {
	return func(ctx context.Context, out io.Writer, argv ...string) error {
		cmd := c.Client().Command(ctx, argv...)
		cmd.Stdout, cmd.Stderr = out, out
		return cmd.Run()
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
