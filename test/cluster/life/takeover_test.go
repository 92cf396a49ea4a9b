package life

import (
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/flows/probe"
)

// TestTakeover does what docs/tutorials/kubeadm.md says, from kube-proxy's DaemonSet to
// Spillway and back.
func TestTakeover(t *testing.T) {
	c, l := start(t, cluster.KubeProxyIPTables)
	l.start(t, c)
	t.Run("there", func(t *testing.T) {
		defer l.end(t)
		must(t, c.InstallSpillway(t.Context(), "takeover=true", "healthz.port=20256", "metrics.port=20249"))
		kubectl(t, c, "patch", "daemonset", "kube-proxy", "--patch", `{"spec":{"template":{"spec":{"nodeSelector":{"spillway.dev/kube-proxy":"yes"}}}}}`)
		waitUntil(t, "each agent took over", func() bool {
			return strings.Count(kubectl(t, c, "logs", "--selector=app.kubernetes.io/name=spillway", "--tail=-1"), "took over from kube-proxy") == 3
		})
		must(t, c.InstallSpillway(t.Context()))
		for _, n := range c.AllNodes() {
			rules, err := n.Command(t.Context(), "iptables-nft-save").Output()
			must(t, err)
			if strings.Contains(string(rules), "KUBE-SVC-") {
				t.Errorf("%s still has kube-proxy's rules", n.Name())
			}
		}
	})
	l.start(t, c)
	t.Run("back", func(t *testing.T) {
		// The programs that rewrote its packets are gone: docs/how-to/take-over-from-kube-proxy.md.
		defer l.end(t, "tcp from client0")
		must(t, c.InstallSpillway(t.Context(), `nodeSelector.spillway\.dev/serves=none`))
		must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
		kubectl(t, c, "patch", "daemonset", "kube-proxy", "--type=json", "--patch",
			`[{"op":"remove","path":"/spec/template/spec/nodeSelector/spillway.dev~1kube-proxy"}]`)
		must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/kube-proxy"))
		for _, n := range c.AllNodes() {
			waitUntil(t, "kube-proxy has written its rules", func() bool {
				out, err := n.Command(t.Context(), "curl", "--silent", "http://127.0.0.1:10249/metrics").Output()
				return err == nil && !strings.Contains(string(out), "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds 0\n") &&
					strings.Contains(string(out), "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds")
			})
		}
		must(t, c.InstallSpillway(t.Context(), "cleanup=true"))
		must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
		helm(t, c, "uninstall", "spillway", "--wait")
		wantNothingLeft(t, c)
	})
}

// TestUninstall checks that a cleanup leaves nothing on a node, and that Spillway can be
// installed again.
func TestUninstall(t *testing.T) {
	c, l := start(t, cluster.Spillway)
	must(t, c.InstallSpillway(t.Context(), "cleanup=true"))
	must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
	helm(t, c, "uninstall", "spillway", "--wait")
	wantNothingLeft(t, c)
	resp, err := l.probes["client0"].Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", TimeoutMS: 1000, Dst: l.service(c, "client0")})
	must(t, err)
	if a := resp.Answers[0]; a.Err == probe.OK {
		t.Errorf("%s still serves the NodePort", a.Server)
	}
	must(t, c.InstallSpillway(t.Context()))
	l.settle(t, c)
	l.start(t, c)
	time.Sleep(2 * time.Second)
	l.end(t)
}

// TestBeside has Spillway serve a labeled Service, and kube-proxy all others.
func TestBeside(t *testing.T) {
	c, l := start(t, cluster.KubeProxyNFTables)
	must(t, c.InstallSpillway(t.Context(), "mode=beside"))
	kubectl(t, c, "label", "service", "peer", "--namespace=default", "service.kubernetes.io/service-proxy-name=spillway")
	waitUntil(t, "kube-proxy has left the Service", func() bool {
		for _, n := range c.AllNodes() {
			out, err := n.Command(t.Context(), "nft", "list", "table", "ip", "kube-proxy").Output()
			if err != nil || strings.Contains(string(out), "10.96.7.7") {
				return false
			}
		}
		return true
	})
	l.settle(t, c)
	l.start(t, c)
	// kube-proxy serves DNS: a rollout of CoreDNS needs the Service "kubernetes".
	kubectl(t, c, "rollout", "restart", "deployment/coredns")
	must(t, c.WaitForRollout(t.Context(), "kube-system", "deployment/coredns"))
	l.end(t)
}

func wantNothingLeft(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	for _, n := range c.AllNodes() {
		// The kernel itself puts maps.debug and progs.debug there.
		out, err := n.Command(t.Context(), "bash", "-euc",
			"find /sys/fs/bpf /run/spillway -mindepth 1 ! -name '*.debug'; nft list tables | grep spillway || true").Output()
		must(t, err)
		if left := strings.TrimSpace(string(out)); left != "" {
			t.Errorf("the cleanup left on %s: %s", n.Name(), left)
		}
	}
}

func kubectl(t *testing.T, c *cluster.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), append([]string{"--namespace=kube-system"}, args...)...)
	must(t, err)
	return out
}

func helm(t *testing.T, c *cluster.Cluster, args ...string) {
	t.Helper()
	_, err := c.Helm(t.Context(), append(args, "--namespace=kube-system", "--timeout=3m")...)
	must(t, err)
}
