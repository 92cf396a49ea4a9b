package cluster

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/process"
	"spillway.dev/spillway/test/cluster/programs"
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

// kubeadmIgnores are the preflight checks that this kind of node fails: the kubelet
// must be allowed to use cgroup v1, and kubeadm asks for a second confirmation.
const kubeadmIgnores = "--ignore-preflight-errors=SystemVerification"

// nodeResolvConf names a DNS server that does not exist. kubeadm's CoreDNS forwards to the
// node's, and does not start if there is none.
const nodeResolvConf = "nameserver 192.0.2.53\n"

// startKubeadm makes the control plane and the nodes with kubeadm init and kubeadm join.
func (c *Cluster) startKubeadm(ctx context.Context) error {
	config, err := c.kubeadmConfig()
	if err != nil {
		return err
	}
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
	if err := writeFile(filepath.Join(first.dir, "kubeadm.yaml"), config); err != nil {
		return err
	}
	if _, err := c.kubeadm(ctx, first, "init", "--config", "/mnt/kubeadm.yaml", kubeadmIgnores); err != nil {
		return err
	}
	kubeconfig, err := first.Command(ctx, "cat", "/etc/kubernetes/admin.conf").Output()
	if err != nil {
		return fmt.Errorf("read kubeadm's admin.conf: %w", err)
	}
	if err := writeFile(Kubeconfig(c.Name), kubeconfig); err != nil {
		return err
	}
	join, err := c.kubeadm(ctx, first, "token", "create", "--print-join-command")
	if err != nil {
		return err
	}
	args := append(strings.Fields(join)[1:], kubeadmIgnores)
	for _, n := range c.nodes[1:] {
		if _, err := c.kubeadm(ctx, n, args...); err != nil {
			return err
		}
	}
	return nil
}

// kubeadm runs kubeadm on a node and returns its output.
func (c *Cluster) kubeadm(ctx context.Context, n *Node, args ...string) (string, error) {
	cmd := n.Command(ctx, c.withPath(append([]string{"kubeadm"}, args...)...)...)
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("run kubeadm %s on %s: %w: %s%s", args[0], n.Name(), err, out, &log)
	}
	return string(out), nil
}

// withPath prepares a command that finds the programs of hack/peers by their names.
func (c *Cluster) withPath(argv ...string) []string {
	return append([]string{"env", "PATH=" + c.programs + ":" + os.Getenv("PATH")}, argv...)
}

// kubeadmConfig returns the configuration of docs/tutorials/kubeadm.md, and what nodes on a
// shared machine need.
func (c *Cluster) kubeadmConfig() ([]byte, error) {
	version, err := programs.Version()
	if err != nil {
		return nil, err
	}
	kubelet := map[string]any{"resolvConf": "/mnt/resolv.conf"}
	for _, field := range []string{"apiVersion", "kind", "cgroupDriver", "failCgroupV1", "failSwapOn", "enforceNodeAllocatable",
		"evictionHard", "imageGCHighThresholdPercent", "imageGCLowThresholdPercent", "oomScoreAdj"} {
		kubelet[field] = kubeletConfig[field]
	}
	var out []byte
	for _, document := range []map[string]any{
		{
			"apiVersion":       "kubeadm.k8s.io/v1beta4",
			"kind":             "InitConfiguration",
			"skipPhases":       []string{"addon/kube-proxy"},
			"localAPIEndpoint": map[string]any{"advertiseAddress": c.APIServer()},
			"nodeRegistration": map[string]any{"criSocket": kubeletConfig["containerRuntimeEndpoint"]},
		},
		{
			"apiVersion":        "kubeadm.k8s.io/v1beta4",
			"kind":              "ClusterConfiguration",
			"kubernetesVersion": version,
			"networking":        map[string]any{"podSubnet": c.topology.Spec.ClusterCIDR4.String()},
		},
		kubelet,
	} {
		text, err := yaml.Marshal(document)
		if err != nil {
			return nil, err
		}
		out = append(append(out, "---\n"...), text...)
	}
	return out, nil
}
