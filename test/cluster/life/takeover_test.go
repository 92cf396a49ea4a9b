package life

import (
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// TestTakeover does what docs/tutorials/kubeadm.md says, from kube-proxy's DaemonSet to
// Spillway and back.
func TestTakeover(t *testing.T) {
	c, l := start(t, cluster.Proxy("kube-proxy-"+*kubeProxy))
	if rules(t, c, "KUBE-SVC-|table .* kube-proxy") == "" {
		t.Fatal("kube-proxy has written no rules")
	}
	l.start(t, c)
	t.Run("there", func(t *testing.T) {
		defer l.end(t)
		clustertest.Must(t, c.InstallSpillway(t.Context(), "takeover=true", "healthz.port=20256", "metrics.port=20249"))
		kubectl(t, c, "patch", "daemonset", "kube-proxy", "--patch",
			`{"spec":{"template":{"spec":{"nodeSelector":{"spillway.dev/kube-proxy":"yes"}}}}}`)
		await.True(t, "each agent took over", func() bool {
			return strings.Count(kubectl(t, c, "logs", "--selector=app.kubernetes.io/name=spillway", "--tail=-1"), "took over from kube-proxy") == 3
		})
		clustertest.Must(t, c.InstallSpillway(t.Context()))
		if left := rules(t, c, "KUBE-SVC-|table .* kube-proxy"); left != "" {
			t.Errorf("kube-proxy's rules are left: %s", left)
		}
	})
	l.start(t, c)
	t.Run("back", func(t *testing.T) {
		var except []excuse
		if *proxyMode == "ebpf" {
			// The programs that rewrote its packets are gone: docs/how-to/take-over-from-kube-proxy.md.
			except = append(except, excuse{"tcp from client0", 1, false})
		}
		defer l.end(t, except...)
		clustertest.Must(t, c.InstallSpillway(t.Context(), `nodeSelector.spillway\.dev/serves=none`))
		clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
		kubectl(t, c, "patch", "daemonset", "kube-proxy", "--type=json", "--patch",
			`[{"op":"remove","path":"/spec/template/spec/nodeSelector/spillway.dev~1kube-proxy"}]`)
		clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/kube-proxy"))
		for _, n := range c.AllNodes() {
			await.True(t, "kube-proxy has written its rules", func() bool {
				out, err := n.Command(t.Context(), "curl", "--silent", "http://127.0.0.1:10249/metrics").Output()
				return err == nil && !strings.Contains(string(out), "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds 0\n") &&
					strings.Contains(string(out), "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds")
			})
		}
		clustertest.Must(t, c.InstallSpillway(t.Context(), "cleanup=true"))
		clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
		helm(t, c, "uninstall", "spillway", "--wait")
		wantNothingLeft(t, c)
	})
}

// TestBeside has Spillway serve a labeled Service, and kube-proxy all others.
func TestBeside(t *testing.T) {
	c, l := start(t, cluster.KubeProxyNFTables)
	clustertest.Must(t, c.InstallSpillway(t.Context(), "mode=beside"))
	kubectl(t, c, "label", "service", "peer", "--namespace=default", "service.kubernetes.io/service-proxy-name=spillway")
	await.True(t, "kube-proxy has left the Service", func() bool {
		for _, n := range c.AllNodes() {
			out, err := n.Command(t.Context(), "nft", "list", "table", "ip", "kube-proxy").Output()
			if err != nil || strings.Contains(string(out), clustertest.ClusterIP) {
				return false
			}
		}
		return true
	})
	l.settle(t, c)
	l.start(t, c)
	// kube-proxy serves DNS: a rollout of CoreDNS needs the Service "kubernetes".
	kubectl(t, c, "rollout", "restart", "deployment/coredns")
	clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "deployment/coredns"))
	l.end(t)
}

func wantNothingLeft(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	left := rules(t, c, "SPW-|spillway")
	for _, n := range c.AllNodes() {
		// The kernel itself puts maps.debug and progs.debug there.
		out, err := n.Command(t.Context(), "find", "/sys/fs/bpf", "/run/spillway", "-mindepth", "1", "!", "-name", "*.debug").Output()
		clustertest.Must(t, err)
		left += string(out)
	}
	if left != "" {
		t.Errorf("the cleanup left %s", left)
	}
}

// rules returns the lines about nftables' tables and about iptables' rules, of both
// variants, that match the expression.
func rules(t *testing.T, c *cluster.Cluster, expression string) string {
	t.Helper()
	found := ""
	for _, n := range c.AllNodes() {
		out, err := n.Command(t.Context(), "bash", "-euo", "pipefail", "-c",
			`{ nft list tables; for save in ip{,6}tables-{nft,legacy}-save; do "$save"; done; } | { grep -E "$1" || true; }`,
			"bash", expression).Output()
		clustertest.Must(t, err)
		found += string(out)
	}
	return found
}

func kubectl(t *testing.T, c *cluster.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), append([]string{"--namespace=kube-system"}, args...)...)
	clustertest.Must(t, err)
	return out
}

func helm(t *testing.T, c *cluster.Cluster, args ...string) {
	t.Helper()
	_, err := c.Helm(t.Context(), append(args, "--namespace=kube-system", "--timeout=3m")...)
	clustertest.Must(t, err)
}
