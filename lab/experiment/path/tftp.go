package path

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

const (
	metalTFTPPort = 8069
	tftpPort      = 69
	// fileTimeout is the time without a packet after which a file has failed: the load
	// repeats no request.
	fileTimeout = 200 * time.Millisecond
)

// KubeProxy is one of Proxies: kube-proxy, and a manual rule that assigns the kernel's
// helper to the Service's connections.
const KubeProxy = "kube-proxy"

// Proxies are the proxies with which file transfers can be measured.
var Proxies = append(slices.Clone(Modes), KubeProxy)

func (c Config) validateFiles() error {
	if c.Files != nil && len(c.Files) == 0 {
		return fmt.Errorf("no mode: use some of %s", strings.Join(Proxies, ", "))
	}
	for i, p := range c.Files {
		if !slices.Contains(Proxies, p) || slices.Contains(c.Files[:i], p) {
			return fmt.Errorf("mode %q: not one, or twice: use some of %s", p, strings.Join(Proxies, ", "))
		}
	}
	if slices.Contains(c.Files, KubeProxy) {
		if _, err := controlplane.Program("kube-proxy"); err != nil {
			return err
		}
	}
	return nil
}

// runFiles measures one proxy after another, each on a cluster of its own and
// beside metal there.
func runFiles(ctx context.Context, cfg Config, report *Report) error {
	if err := harness.NeedPrograms(map[string]string{"conntrack": "conntrack", "iptables": "iptables"}); err != nil {
		return err
	}
	for _, proxy := range cfg.Files {
		cfg.Mode = proxy
		b := &bench{cfg: cfg, saturation: map[load.Kind]float64{}, report: report}
		spec := topology.DefaultSpec(cfg.Name)
		// Without masquerading: it would change the source of a server's first block to a
		// client that addresses the pod itself. That client is the base of the
		// comparison.
		spec.Conntrack, spec.Clients = !cfg.Untracked, 2
		err := b.run(ctx, spec, func(c *topology.Cluster) []plan { return filePlans(c, proxy, !cfg.Untracked) })
		if none := (noneError{}); errors.As(err, &none) && (proxy != cfg.Files[len(cfg.Files)-1] || len(report.Comparisons) > 0) {
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// filePlans lists the comparisons for one proxy. Targets apply to Spillway's
// own dataplane.
func filePlans(c *topology.Cluster, proxy string, tracked bool) []plan {
	client, node := c.Client(0), c.Node(0)
	here := plan{name: proxy + ": NodePort, pod on this node ÷ metal", kind: load.TFTP,
		base: way{client, netip.AddrPortFrom(node.IPv4, metalTFTPPort)}, baseServer: node,
		service: way{client, netip.AddrPortFrom(node.IPv4, hereNodePort)}, server: c.Pod(0, 0)}
	full := here
	full.full = true
	there := plan{name: proxy + ": NodePort, pod on other node ÷ pod address", kind: load.TFTP,
		base: way{client, netip.AddrPortFrom(c.Pod(1, 0).IPv4, tftpPort)}, baseServer: c.Pod(1, 0),
		service: way{client, netip.AddrPortFrom(node.IPv4, thereNodePort)}, server: c.Pod(1, 0)}
	out := []plan{here}
	if tracked {
		out = append(out, full)
	}
	if proxy != "ebpf" {
		return out
	}
	for i := range out {
		out[i].target = &experiment.Target{Limit: 0.95}
	}
	out[0].control = true
	there.target = &experiment.Target{Limit: 0.85}
	return slices.Insert(out, 1, there)
}

// filesArm measures one side of a comparison.
func (b *bench) filesArm(p plan, w way) experiment.Arm[harness.Sample] {
	server, full, rules := p.baseServer, false, ""
	if w == p.service {
		server, full, rules = p.server, p.full, p.rules
	}
	cfg := load.Config{Kind: p.kind, Target: w.to, Connections: b.cfg.Connections, Duration: b.cfg.Duration,
		Warmup: b.cfg.Warmup, Timeout: fileTimeout}
	return b.withRules(rules, func(ctx context.Context) (harness.Sample, error) {
		return b.harness.MeasureFiles(ctx, w.from, server, cfg, full)
	})
}

// serveByKubeProxy starts kube-proxy on node0, and assigns the helper there as its
// users have to.
func (b *bench) serveByKubeProxy(ctx context.Context) error {
	c := b.harness.Cluster
	b.cfg.Progress.Step("starting an API server, and kube-proxy on node0")
	var objects []runtime.Object
	for _, s := range benchServices(c) {
		objects = append(objects, service(s.name, s.clusterIP, s.nodePort, tftpPort, corev1.ProtocolUDP),
			slice(s.name, s.pod, tftpPort, corev1.ProtocolUDP))
	}
	if _, err := b.harness.API(ctx, c.Client(1), objects...); err != nil {
		return err
	}
	if err := b.harness.KubeProxy(ctx, c.Node(0), "iptables", 0); err != nil {
		return err
	}
	cmd := c.Node(0).Command(ctx, "iptables", "-w", "-t", "raw", "-A", "PREROUTING", "-p", "udp", "--dport", fmt.Sprint(hereNodePort), "-j",
		"CT", "--helper", "tftp")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("assign helper on %s: %w: %s: is the module nf_conntrack_tftp there?", c.Node(0).Name, err,
			strings.TrimSpace(string(out)))
	}
	return nil
}

// waitAnswerOf waits until a path works for a kind of load.
func (b *bench) waitAnswerOf(ctx context.Context, kind load.Kind, w way) error {
	if kind != load.TFTP {
		return b.harness.WaitAnswer(ctx, w.from, workload.HTTP, w.to)
	}
	const tries = 20
	for range tries {
		r, err := b.harness.Load(ctx, w.from, load.Config{Kind: load.TFTP, Target: w.to, Connections: 1, Duration: 100 * time.Millisecond,
			Timeout: fileTimeout / 4})
		if err != nil {
			return err
		}
		if r.Requests > 0 {
			return nil
		}
	}
	return fmt.Errorf("wait for %s to answer %s: no file after %d tries", w.to, w.from.Name, tries)
}
