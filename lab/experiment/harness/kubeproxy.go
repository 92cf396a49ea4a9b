package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/lab/agent"
	"spillway.dev/spillway/lab/controlplane"
	"spillway.dev/spillway/lab/topology"
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

// Plane starts an API server on a host of the cluster and gives it the cluster's
// Nodes and some Services with their EndpointSlices. It returns a kubeconfig.
func (h *Harness) Plane(ctx context.Context, host *topology.Host, services []*corev1.Service, slices []*discoveryv1.EndpointSlice) (kubeconfig string, err error) {
	dir, err := h.PlaneDir()
	if err != nil {
		return "", err
	}
	if h.plane, err = controlplane.Up(ctx, controlplane.Config{Dir: dir, Host: host}); err != nil {
		return "", err
	}
	client, err := h.Client()
	if err != nil {
		return "", err
	}
	if err := CreateNodes(ctx, client, h.Cluster); err != nil {
		return "", err
	}
	for _, s := range services {
		if err := controlplane.EnsureNamespace(ctx, client, s.Namespace); err != nil {
			return "", err
		}
		if _, err := client.CoreV1().Services(s.Namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			return "", fmt.Errorf("create Service: %w", err)
		}
	}
	for _, s := range slices {
		if _, err := client.DiscoveryV1().EndpointSlices(s.Namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			return "", fmt.Errorf("create EndpointSlice: %w", err)
		}
	}
	return h.plane.AdminKubeconfig()
}

// CreateNodes writes a cluster's Nodes, with their addresses: kube-proxy waits for
// half a minute for the addresses of its own Node.
func CreateNodes(ctx context.Context, client kubernetes.Interface, c *topology.Cluster) error {
	for _, n := range c.NodeObjects() {
		created, err := client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create Node: %w", err)
		}
		created.Status = n.Status
		if _, err := client.CoreV1().Nodes().UpdateStatus(ctx, created, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("write Node's addresses: %w", err)
		}
	}
	return nil
}

// Client returns a client of the API server that Plane started.
func (h *Harness) Client() (kubernetes.Interface, error) {
	if h.plane == nil {
		return nil, errors.New("open client: there is no API server")
	}
	client, err := kubernetes.NewForConfig(h.plane.REST())
	if err != nil {
		return nil, fmt.Errorf("open client: %w", err)
	}
	return client, nil
}

// KubeProxy starts kube-proxy on a node and waits for its first sync. The mode may
// name a variant of iptables: "iptables-legacy". kube-proxy syncs at most once a
// period; 0 is its default of 1 s. It leaves machine-wide settings unchanged.
func (h *Harness) KubeProxy(ctx context.Context, node *topology.Host, kubeconfig, mode string, period time.Duration) error {
	programs, err := controlplane.Programs()
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
`, mode, kubeconfig, h.Cluster.Spec.ClusterCIDR4, period))
	if err != nil {
		return err
	}
	p, err := start(node, "kube-proxy on "+node.Name, []string{filepath.Join(programs, "kube-proxy"),
		"--config", config, "--hostname-override", node.Name}, env...)
	if err != nil {
		return err
	}
	h.agents = append(h.agents, p)
	return p.until(ctx, "does not serve", 2*time.Minute, func(ctx context.Context) error { return agent.Synced(ctx, node) })
}
