package cluster

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/process"
	"spillway.dev/spillway/test/testbed/topology"
)

// Node is a machine of the cluster: namespaces of its own for network, mounts, processes,
// cgroups and its host name, with a containerd and a kubelet.
type Node struct {
	cluster    *Cluster
	host       *topology.Host
	dir        string
	first      *process.Process // unshare, whose child is the node's process 1
	pid        int              // of the node's process 1
	containerd *process.Process
	kubelet    *process.Process
}

//go:embed node.sh
var nodeScript []byte

// inNode moves a process into the node's cgroups of v1, if the machine has any, and ends
// it with its parent, which nsenter is.
const inNode = `[[ -e /sys/fs/cgroup/cgroup.procs ]] || for f in /sys/fs/cgroup/*/cgroup.procs; do echo 0 >"$f"; done
exec setpriv --pdeathsig TERM "$@"`

// Name returns the node's name in the API.
func (n *Node) Name() string { return n.host.Name }

// Host returns the node's network namespace and cgroup2.
func (n *Node) Host() *topology.Host { return n.host }

// Command prepares a process inside all of the node's namespaces.
func (n *Node) Command(ctx context.Context, argv ...string) *topology.Cmd {
	return n.host.Command(ctx, n.enter(argv)...)
}

// Log returns the path of the output of "node", "containerd" or "kubelet".
func (n *Node) Log(program string) string { return filepath.Join(n.dir, program+".log") }

// SetCable cuts the node off from the LAN ("down"), or connects it again ("up"). The node's own
// device keeps its addresses and routes.
func (n *Node) SetCable(ctx context.Context, state string) error {
	lan := *n.host
	lan.Namespace = "spw-" + n.cluster.Name + "-lan"
	if out, err := lan.Command(ctx, "ip", "link", "set", n.Name(), state).CombinedOutput(); err != nil {
		return fmt.Errorf("set cable of %s %s: %w: %s", n.Name(), state, err, out)
	}
	return nil
}

func (n *Node) enter(argv []string) []string {
	return append([]string{"nsenter", "--target", strconv.Itoa(n.pid), "--mount", "--uts", "--ipc", "--pid", "--cgroup",
		"--", "bash", "-euc", inNode, "bash"}, argv...)
}

// start starts the node and its containerd. Its kubelet follows with the control plane.
func (n *Node) start(ctx context.Context) (err error) {
	pause, err := images.Reference("pause")
	if err != nil {
		return err
	}
	script := filepath.Join(n.dir, "node.sh")
	files := map[string][]byte{
		script: nodeScript,
		filepath.Join(n.dir, "etc/containerd/config.toml"): fmt.Appendf(nil, containerdConfig, pause),
	}
	for path, content := range files {
		if err := writeFile(path, content); err != nil {
			return err
		}
	}
	n.first, err = process.Start(n.host, n.Log("node"),
		[]string{"bash", script, n.Name(), n.dir, n.host.Cgroup, cgroupParent + "/" + n.cluster.Name + "/" + n.Name()})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, n.cluster.Wait)
	defer cancel()
	err = n.first.Until(ctx, func(context.Context) error {
		_, err := os.Stat(filepath.Join(n.dir, "ready"))
		return err
	})
	if err != nil {
		return err
	}
	if n.pid, err = onlyChild(n.first.ID()); err != nil {
		return err
	}
	return n.startContainerd(ctx)
}

func onlyChild(pid int) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	if err != nil {
		return 0, fmt.Errorf("find the node's process 1: %w", err)
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

const containerdConfig = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true # without CAP_SYS_RESOURCE it cannot be lowered
`

func (n *Node) startContainerd(ctx context.Context) (err error) {
	if n.containerd, err = process.Start(n.host, n.Log("containerd"), n.enter([]string{"containerd"})); err != nil {
		return err
	}
	return n.containerd.Until(ctx, func(ctx context.Context) error {
		return n.Command(ctx, "ctr", "version").Run()
	})
}

// ImportImage gives the node an image from an archive.
func (n *Node) ImportImage(ctx context.Context, archive string) error {
	out, err := n.Command(ctx, "ctr", "--namespace", "k8s.io", "images", "import", archive).CombinedOutput()
	if err != nil {
		return fmt.Errorf("import %s on %s: %w: %s", archive, n.Name(), err, out)
	}
	return nil
}

// StartKubelet starts the kubelet, and waits until it has registered the node.
func (n *Node) StartKubelet(ctx context.Context) error {
	cp := n.cluster.controlPlane
	server := "https://" + net.JoinHostPort(n.apiServer().String(), "6443")
	kubeconfig, err := cp.KubeconfigAt(server, controlplane.User{Name: "system:node:" + n.Name(), Groups: []string{"system:nodes"}})
	if err != nil {
		return err
	}
	if err := copyFile(kubeconfig, filepath.Join(n.dir, "kubelet.kubeconfig")); err != nil {
		return err
	}
	own := maps.Clone(kubeletConfig)
	own["clusterDNS"] = dnsAddresses(n.cluster.Families, n.host.Index)[:1]
	config, err := yaml.Marshal(own)
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(n.dir, "kubelet.yaml"), config); err != nil {
		return err
	}
	n.kubelet, err = process.Start(n.host, n.Log("kubelet"), n.enter([]string{n.cluster.program("kubelet"),
		"--config", "/mnt/kubelet.yaml",
		"--kubeconfig", "/mnt/kubelet.kubeconfig",
		"--hostname-override", n.Name(),
		"--node-ip", join(n.Addresses()),
		"--node-labels", "topology.kubernetes.io/zone=" + n.Name(), // tests of traffic distribution need three
		"--v", "2",
	}))
	if err != nil {
		return err
	}
	_, err = n.cluster.Kubectl(ctx, "wait", "node/"+n.Name(), "--for=create", "--timeout="+n.cluster.Wait.String())
	return err
}

// StopKubelet ends the kubelet; its pods continue.
func (n *Node) StopKubelet() {
	n.kubelet.Stop(stopWithin)
	n.kubelet = nil
}

const stopWithin = 5 * time.Second

// kubeletConfig suits a node that shares a machine, and a machine without CAP_SYS_RESOURCE.
var kubeletConfig = map[string]any{
	"apiVersion":               "kubelet.config.k8s.io/v1beta1",
	"kind":                     "KubeletConfiguration",
	"authentication":           map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
	"authorization":            map[string]any{"mode": "AlwaysAllow"},
	"containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
	"cgroupDriver":             "cgroupfs",
	"failCgroupV1":             false,
	"failSwapOn":               false,
	// An image that was imported may have been pulled by another name, too.
	"imagePullCredentialsVerificationPolicy": "NeverVerify",
	"enforceNodeAllocatable":                 []string{},
	"clusterDomain":                          "cluster.local",
	// Nothing is evicted, and no image is deleted: none can be pulled again.
	"evictionHard": map[string]any{"memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
		"imagefs.available": "0%"},
	"imageGCHighThresholdPercent": 100,
	"imageGCLowThresholdPercent":  99,
	"oomScoreAdj":                 0,
	"nodeStatusUpdateFrequency":   "5s",
}

func (n *Node) stop() {
	n.kubelet.Stop(stopWithin)
	n.containerd.Stop(stopWithin)
	n.first.Kill() // the kernel kills all other processes of the node
	n.kubelet, n.containerd, n.first = nil, nil, nil
}

func writeFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return writeFile(to, content)
}
