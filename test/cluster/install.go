package cluster

import (
	"bytes"
	"context"
	"embed"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"spillway.dev/spillway/test/cluster/images"
)

// CNI names how pods of different nodes reach each other.
type CNI string

// The CNIs.
const (
	FlannelVXLAN  CNI = "flannel-vxlan"
	FlannelHostGW CNI = "flannel-host-gw"
	// Bridge is the plugins bridge and host-local, with a route to each other node's pods.
	Bridge CNI = "bridge"
)

// CNIs lists all of them, the default first.
var CNIs = []CNI{FlannelVXLAN, FlannelHostGW, Bridge}

//go:embed manifests
var manifests embed.FS

// Kubectl runs kubectl with full rights on the client, and returns its output.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.kubectl(ctx, "", args...)
}

// Apply applies manifests.
func (c *Cluster) Apply(ctx context.Context, yaml string) error {
	_, err := c.kubectl(ctx, yaml, "apply", "--filename", "-")
	return err
}

func (c *Cluster) kubectl(ctx context.Context, input string, args ...string) (string, error) {
	return c.client(ctx, input, append([]string{c.program("kubectl")}, args...)...)
}

// Helm runs helm with full rights on the client, and returns its output.
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	return c.client(ctx, "", append([]string{c.program("helm")}, args...)...)
}

// client runs a program on the client, as an operator of the cluster does.
func (c *Cluster) client(ctx context.Context, input string, argv ...string) (string, error) {
	cmd := c.Client().Command(ctx, argv...)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+Kubeconfig(c.Name))
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("run %s: %w", strings.Join(argv[1:], " "), err)
	}
	return string(out), nil
}

// applyFile applies a manifest of this package.
func (c *Cluster) applyFile(ctx context.Context, name, backend string) error {
	tmpl, err := template.New(name).Funcs(template.FuncMap{"image": images.Reference}).ParseFS(manifests, "manifests/"+name)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	err = tmpl.Execute(&text, map[string]any{
		"APIServer":   c.APIServer(),
		"Server":      net.JoinHostPort(c.APIServer(), "6443"),
		"Backend":     backend,
		"ClusterCIDR": join(c.clusterCIDRs()),
		"Spec":        c.topology.Spec,
		"DNS":         dnsAddresses(c.Families, wholeCluster),
	})
	if err != nil {
		return err
	}
	return c.Apply(ctx, text.String())
}

// Proxy names what serves Services.
type Proxy string

// The proxies.
const (
	Spillway          Proxy = "spillway"
	KubeProxyIPTables Proxy = "kube-proxy-iptables"
	// KubeProxyIPTablesLegacy uses the legacy variant of iptables, not that of nf_tables.
	KubeProxyIPTablesLegacy Proxy = "kube-proxy-iptables-legacy"
	KubeProxyNFTables       Proxy = "kube-proxy-nftables"
)

// Proxies lists all of them, the default first.
var Proxies = []Proxy{Spillway, KubeProxyIPTables, KubeProxyIPTablesLegacy, KubeProxyNFTables}

func (c *Cluster) installProxy(ctx context.Context) error {
	if mode, ok := strings.CutPrefix(string(c.Proxy), "kube-proxy-"); ok {
		return c.InstallKubeProxy(ctx, mode)
	}
	return c.InstallSpillway(ctx)
}

// installCNI installs the pod network and waits until all nodes are Ready.
func (c *Cluster) installCNI(ctx context.Context) error {
	var err error
	switch c.CNI {
	case Bridge:
		err = c.installBridge(ctx)
	default:
		err = c.applyFile(ctx, "flannel.yaml", strings.TrimPrefix(string(c.CNI), "flannel-"))
	}
	if err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, "wait", "nodes", "--all", "--for=condition=Ready", "--timeout="+c.Wait.String())
	return err
}

const bridgeConfig = `{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [
    {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "hairpinMode": true,
     "ipam": {"type": "host-local", "ranges": [%s]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`

// bridgeMasquerade gives packets that leave the pod network the node's address.
const bridgeMasquerade = `table %[1]s pods {
	chain postrouting {
		type nat hook postrouting priority srcnat;
		%[1]s saddr %[2]s %[1]s daddr != %[3]s masquerade
	}
}
`

// installBridge writes the configuration and the routes that an operator would.
func (c *Cluster) installBridge(ctx context.Context) error {
	cidrs := map[*Node][]netip.Prefix{} // of the families that the node has
	for _, n := range c.nodes {
		text, err := c.Kubectl(ctx, "wait", "node/"+n.Name(), "--for=jsonpath={.spec.podCIDR}", "--timeout="+c.Wait.String(),
			"--output=jsonpath={.spec.podCIDRs[*]}")
		if err != nil {
			return err
		}
		for _, field := range strings.Fields(text) {
			cidr, err := netip.ParsePrefix(field)
			if err != nil {
				return fmt.Errorf("read podCIDRs of %s: %w", n.Name(), err)
			}
			if slices.Contains(n.Addresses(), n.host.Addr(cidr.Addr())) {
				cidrs[n] = append(cidrs[n], cidr)
			}
		}
	}
	for _, n := range c.nodes {
		var ranges []string
		script := ""
		for _, cidr := range cidrs[n] {
			ranges = append(ranges, fmt.Sprintf(`[{"subnet": "%s"}]`, cidr))
			family, all := "ip", c.topology.Spec.ClusterCIDR4
			if cidr.Addr().Is6() {
				family, all = "ip6", c.topology.Spec.ClusterCIDR6
			}
			script += "nft -f - <<'END'\n" + fmt.Sprintf(bridgeMasquerade, family, cidr, all) + "END\n"
			for _, other := range c.nodes {
				for _, to := range cidrs[other] {
					if other != n && to.Addr().Is4() == cidr.Addr().Is4() {
						script += fmt.Sprintf("ip route add %s via %s\n", to, other.host.Addr(to.Addr()))
					}
				}
			}
		}
		script += fmt.Sprintf("cat >/etc/cni/net.d/10-bridge.conflist <<'END'\n%sEND\n", fmt.Sprintf(bridgeConfig, strings.Join(ranges, ", ")))
		if out, err := n.Command(ctx, "bash", "-euc", script).CombinedOutput(); err != nil {
			return fmt.Errorf("configure the bridge plugin on %s: %w: %s", n.Name(), err, out)
		}
	}
	return nil
}

// InstallSpillway installs or upgrades the chart, and waits until its Pods are Ready.
// Values have the form of helm's --set, and are added to those of the cluster.
func (c *Cluster) InstallSpillway(ctx context.Context, values ...string) error {
	values = slices.Concat([]string{
		"image.pullPolicy=Never",
		"k8sServiceHost=" + c.apiServerForNodes(),
		"clusterCIDR={" + join(c.clusterCIDRs()) + "}",
		"cgroupRoot=" + cgroup2Mount(),
	}, c.Values, values)
	args := []string{"upgrade", "--install", "spillway", filepath.Join(c.root, "deploy/helm/spillway"), "--namespace", "kube-system", "--wait",
		"--timeout", c.Wait.String()}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	_, err := c.Helm(ctx, args...)
	return err
}

// cgroup2Mount returns where node.sh mounts cgroup2 on a node: where the machine has it.
func cgroup2Mount() string {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return "/sys/fs/cgroup"
	}
	return "/sys/fs/cgroup/unified"
}

// InstallKubeProxy installs kube-proxy as kubeadm does, in the given mode or in
// iptables-legacy, and waits until its Pods are Ready.
func (c *Cluster) InstallKubeProxy(ctx context.Context, mode string) error {
	if err := c.applyFile(ctx, "kube-proxy.yaml", mode); err != nil {
		return err
	}
	return c.WaitForRollout(ctx, "kube-system", "daemonset/kube-proxy")
}

// installDNS installs CoreDNS, unless kubeadm did, and waits for it. Its Pods need a proxy
// to reach the API server.
func (c *Cluster) installDNS(ctx context.Context) error {
	return c.withoutLastNode(ctx, func() error {
		if !c.Kubeadm {
			if err := c.applyFile(ctx, "coredns.yaml", ""); err != nil {
				return err
			}
		}
		return c.WaitForRollout(ctx, "kube-system", "deployment/coredns")
	})
}

// WaitForRollout waits until a workload's Pods are Ready.
func (c *Cluster) WaitForRollout(ctx context.Context, namespace, workload string) error {
	_, err := c.Kubectl(ctx, "--namespace", namespace, "rollout", "status", workload, "--timeout", c.Wait.String())
	return err
}
