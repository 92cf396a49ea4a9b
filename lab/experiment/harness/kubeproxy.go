package harness

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

const planeDir = "plane"

// PlaneDir makes the directory of a control plane, in memory: etcd waits for every
// write, and on a slow disk a measurement would include that wait.
func (h *Harness) PlaneDir() (string, error) {
	dir := h.Path(planeDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make directory for the control plane: %w", err)
	}
	if err := unix.Mount("plane", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return "", fmt.Errorf("mount tmpfs on %s: %w", dir, err)
	}
	return dir, nil
}

// NeedKubeProxy is the Needs of a row of kube-proxy's.
func NeedKubeProxy() error {
	if _, err := controlplane.Program("kube-proxy"); err != nil {
		return fmt.Errorf("%w: %w", experiment.ErrNotBuilt, err)
	}
	return nil
}

// KubeProxy starts kube-proxy on a node and waits for its first sync. The mode may
// name a variant of iptables: "iptables-legacy". It reads objects from the server that API
// started. kube-proxy syncs at most once a period; 0 is its default of 1 s. It leaves
// machine-wide settings unchanged.
func (h *Harness) KubeProxy(ctx context.Context, node *topology.Host, mode string, period time.Duration) error {
	program, err := controlplane.Program("kube-proxy")
	if err != nil {
		return err
	}
	if period == 0 {
		period = time.Second
	}
	mode, variant, _ := strings.Cut(mode, "-")
	var env []string
	if variant != "" {
		path, err := h.IptablesPath(variant)
		if err != nil {
			return err
		}
		env = append(env, "PATH="+path)
	}
	// A file, since there is no flag for the period of nftables.
	config, err := h.WriteFile("kube-proxy-"+node.Name+".yaml", fmt.Appendf(nil, `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clientConnection: {kubeconfig: %s}
clusterCIDR: %s
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
iptables: {minSyncPeriod: %v}
nftables: {minSyncPeriod: %[4]v}
`, mode, h.kubeconfig, h.Cluster.Spec.ClusterCIDR4, period))
	if err != nil {
		return err
	}
	p, err := start(node, "kube-proxy on "+node.Name, []string{program,
		"--config", config, "--hostname-override", node.Name}, env...)
	if err != nil {
		return err
	}
	h.agents = append(h.agents, p)
	return p.until(ctx, "does not serve", 2*time.Minute, func(ctx context.Context) error { return agent.Synced(ctx, node) })
}
