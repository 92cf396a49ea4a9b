package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/test/cluster/programs"
	"spillway.dev/spillway/test/testbed/process"
)

// kubeletService runs the kubelet as the systemd unit of kubeadm's package does: from the
// time when kubeadm has written its configuration, and again after it ends.
const kubeletService = `until [[ -e /var/lib/kubelet/kubeadm-flags.env ]]; do sleep 0.2; done
cd /
while :; do
  . /var/lib/kubelet/kubeadm-flags.env
  kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
    --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS || true
  sleep 1
done`

// kubeadmIgnored is the preflight check that this kind of node fails: the kubelet must be
// allowed to use cgroup v1, and kubeadm asks for a second confirmation.
const kubeadmIgnored = "SystemVerification"

// nodeResolvConf names a DNS server that does not exist. kubeadm's CoreDNS forwards to the
// node's, and does not start if there is none.
const nodeResolvConf = "nameserver 192.0.2.53\n"

// startKubeadm makes the control plane and the nodes with kubeadm init and kubeadm join.
func (c *Cluster) startKubeadm(ctx context.Context) (err error) {
	for _, n := range c.nodes {
		if err := writeFile(filepath.Join(n.dir, "resolv.conf"), []byte(nodeResolvConf)); err != nil {
			return err
		}
		n.kubelet, err = process.Start(n.host, n.Log("kubelet"), n.enter(c.withPath("bash", "-uc", kubeletService)))
		if err != nil {
			return err
		}
	}
	first := c.nodes[0]
	init := c.KubeadmInit
	if init == nil {
		init = kubeadmInit
	}
	if err := init(ctx, c); err != nil {
		return err
	}
	kubeconfig, err := first.Command(ctx, "cat", "/etc/kubernetes/admin.conf").Output()
	if err != nil {
		return fmt.Errorf("read kubeadm's admin.conf: %w", err)
	}
	if err := writeFile(Kubeconfig(c.Name), kubeconfig); err != nil {
		return err
	}
	join, err := first.Script(ctx, "kubeadm token create --print-join-command")
	if err != nil {
		return err
	}
	for _, n := range c.nodes[1:] {
		if _, err := n.Script(ctx, strings.TrimSpace(join)+" --ignore-preflight-errors="+kubeadmIgnored); err != nil {
			return err
		}
	}
	return nil
}

// kubeadmInit makes a first node without kube-proxy.
func kubeadmInit(ctx context.Context, c *Cluster) error {
	config, err := c.KubeadmConfig(map[string]any{
		"apiVersion": "kubeadm.k8s.io/v1beta4",
		"kind":       "InitConfiguration",
		"skipPhases": []string{"addon/kube-proxy"},
	})
	if err != nil {
		return err
	}
	if err := c.nodes[0].WriteFile("kubeadm.yaml", config); err != nil {
		return err
	}
	_, err = c.nodes[0].Script(ctx, "kubeadm init --config kubeadm.yaml")
	return err
}

// WriteFile writes a file that Script finds in its working directory.
func (n *Node) WriteFile(name string, content []byte) error {
	return writeFile(filepath.Join(n.dir, "operator", name), content)
}

// Script runs a script of bash as an operator who is root on a node that kubeadm made. It
// finds the programs of hack/peers by their names, and the chart in deploy/helm/spillway.
// Its output is also in the error.
func (n *Node) Script(ctx context.Context, script string) (string, error) {
	deploy := filepath.Join(n.dir, "operator/deploy")
	if err := os.MkdirAll(filepath.Dir(deploy), 0o755); err != nil {
		return "", err
	}
	if err := os.Symlink(filepath.Join(n.cluster.root, "deploy"), deploy); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	cmd := n.Command(ctx, n.cluster.withPath("KUBECONFIG=/etc/kubernetes/admin.conf",
		"bash", "-euo", "pipefail", "-c", "cd /mnt/operator\n"+script)...)
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("run on %s: %s: %w: %s%s", n.Name(), strings.TrimSpace(script), err, out, &log)
	}
	return string(out), nil
}

// withPath prepares a command that finds the programs of hack/peers by their names.
func (c *Cluster) withPath(argv ...string) []string {
	return append([]string{"env", "PATH=" + c.Prepared.Programs + ":" + os.Getenv("PATH")}, argv...)
}

// KubeadmConfig returns a configuration for kubeadm init. It adds to an InitConfiguration
// what nodes on a shared machine need.
func (c *Cluster) KubeadmConfig(init map[string]any) ([]byte, error) {
	version, err := programs.Version()
	if err != nil {
		return nil, err
	}
	init = maps.Clone(init)
	init["localAPIEndpoint"] = map[string]any{"advertiseAddress": c.APIServer()}
	init["nodeRegistration"] = map[string]any{
		"criSocket":             kubeletConfig["containerRuntimeEndpoint"],
		"ignorePreflightErrors": []string{kubeadmIgnored},
	}
	kubelet := map[string]any{"resolvConf": "/mnt/resolv.conf"}
	for _, field := range []string{"apiVersion", "kind", "cgroupDriver", "failCgroupV1", "failSwapOn", "enforceNodeAllocatable",
		"evictionHard", "imageGCHighThresholdPercent", "imageGCLowThresholdPercent", "oomScoreAdj"} {
		kubelet[field] = kubeletConfig[field]
	}
	var out []byte
	for _, document := range []map[string]any{
		init,
		{
			"apiVersion":        "kubeadm.k8s.io/v1beta4",
			"kind":              "ClusterConfiguration",
			"kubernetesVersion": version,
			"networking":        map[string]any{"podSubnet": c.topology.Spec.ClusterCIDR4.String()},
		},
		kubelet,
		{
			"apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
			"kind":       "KubeProxyConfiguration",
			"mode":       "iptables",
			"conntrack":  map[string]any{"maxPerCore": 0, "min": 0}, // the sizes belong to the whole machine
		},
	} {
		text, err := yaml.Marshal(document)
		if err != nil {
			return nil, err
		}
		out = append(append(out, "---\n"...), text...)
	}
	return out, nil
}
