package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"spillway.dev/spillway/lab/controlplane"
	"spillway.dev/spillway/lab/process"
	"spillway.dev/spillway/lab/topology"
)

// Config configures a cluster.
type Config struct {
	Name     string // a DNS label of at most 20 characters
	Nodes    int
	Progress func(step string) // nil is silent
	CNI      CNI               // "" is FlannelVXLAN
	Programs string            // directory of the programs; "" is the one of hack/peers
	Images   []string          // archives that every node imports
	Chart    string            // directory of Spillway's chart
	Values   []string          // of the chart, as helm's --set
}

// Cluster is a running cluster. Its control plane runs on the first node.
type Cluster struct {
	Config
	topology     *topology.Cluster
	controlPlane *controlplane.ControlPlane
	scheduler    *process.Process
	nodes        []*Node
}

const (
	dataRoot     = "/var/lib/spillway-cluster"
	cgroupParent = "spillway-cluster"
	dnsAddress   = "10.96.0.10"
)

var serviceCIDR = netip.MustParsePrefix("10.96.0.0/16")

func dataDir(name string) string { return filepath.Join(dataRoot, name) }

// Create makes the network of a cluster. Up starts its programs.
func Create(ctx context.Context, name string, nodes int) (*topology.Cluster, error) {
	return topology.Up(ctx, topology.Spec{Name: name, Nodes: nodes, Clients: 1, PodNetwork: topology.None, IPv4: true})
}

// Up starts a cluster, installs the CNI, Spillway and CoreDNS, and waits until their Pods
// are Ready. After an error it returns what has started, for Down.
func Up(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	if cfg.CNI == "" {
		cfg.CNI = FlannelVXLAN
	}
	if cfg.Programs == "" {
		var err error
		if cfg.Programs, err = controlplane.Programs(); err != nil {
			return nil, err
		}
	}
	c := &Cluster{Config: cfg}
	if err := c.up(ctx); err != nil {
		return c, fmt.Errorf("start cluster %s: %w", cfg.Name, err)
	}
	return c, nil
}

func (c *Cluster) up(ctx context.Context) (err error) {
	if c.topology, err = Create(ctx, c.Name, c.Nodes); err != nil {
		return err
	}
	for i := range c.Nodes {
		host := c.topology.Node(i)
		c.nodes = append(c.nodes, &Node{cluster: c, host: host, dir: filepath.Join(dataDir(c.Name), host.Name)})
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"start nodes", func(ctx context.Context) error { return c.each(ctx, (*Node).start) }},
		{"import images", c.importImages},
		{"start control plane", c.startControlPlane},
		{"start kubelets", func(ctx context.Context) error { return c.each(ctx, (*Node).StartKubelet) }},
		{"install CNI " + string(c.CNI), c.installCNI},
		{"install Spillway", func(ctx context.Context) error { return c.InstallSpillway(ctx, c.Values...) }},
		{"install CoreDNS", c.installDNS},
	} {
		c.Progress(step.name)
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// each does the same on all nodes at once.
func (c *Cluster) each(ctx context.Context, do func(*Node, context.Context) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, n := range c.nodes {
		g.Go(func() error { return do(n, ctx) })
	}
	return g.Wait()
}

func (c *Cluster) importImages(ctx context.Context) error {
	return c.each(ctx, func(n *Node, ctx context.Context) error {
		for _, archive := range c.Images {
			if err := n.importImage(ctx, archive); err != nil {
				return err
			}
		}
		return nil
	})
}

func (c *Cluster) program(name string) string { return filepath.Join(c.Programs, name) }

// Node returns the i-th node.
func (c *Cluster) Node(i int) *Node { return c.nodes[i] }

// Client returns the host outside the cluster.
func (c *Cluster) Client() *topology.Host { return c.topology.Client(0) }

// APIServer returns the API server's address, whose port is 6443.
func (c *Cluster) APIServer() string { return c.topology.Node(0).IPv4.String() }

// ControlPlane returns the control plane, to stop and start its programs.
func (c *Cluster) ControlPlane() *controlplane.ControlPlane { return c.controlPlane }

func (c *Cluster) startControlPlane(ctx context.Context) (err error) {
	dir := filepath.Join(dataDir(c.Name), "control-plane")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	c.controlPlane, err = controlplane.Up(ctx, controlplane.Config{
		Dir:             dir,
		Programs:        c.Programs,
		Host:            c.nodes[0].host,
		ServiceCIDRs:    []netip.Prefix{serviceCIDR},
		ServiceAccounts: true,
		APIServerArgs: []string{
			"--authorization-mode", "Node", // beside RBAC
			"--allow-privileged",
			"--enable-admission-plugins", "NodeRestriction",
			"--kubelet-preferred-address-types", "InternalIP",
		},
		Controllers: []string{"*"},
		ControllerManagerArgs: []string{
			"--allocate-node-cidrs", "--cluster-cidr", c.topology.Spec.ClusterCIDR4.String(),
			"--service-cluster-ip-range", serviceCIDR.String(),
			"--use-service-account-credentials",
		},
		StartWithin: 2 * time.Minute,
	})
	if err != nil {
		return err
	}
	kubeconfig, err := c.controlPlane.AdminKubeconfig()
	if err != nil {
		return err
	}
	if err := copyFile(kubeconfig, kubeconfigFile(c.Name)); err != nil {
		return err
	}
	return c.startScheduler()
}

func kubeconfigFile(name string) string { return filepath.Join(dataDir(name), "admin.kubeconfig") }

func (c *Cluster) startScheduler() error {
	kubeconfig, err := c.controlPlane.Kubeconfig(controlplane.User{Name: "system:kube-scheduler", Groups: []string{"system:masters"}})
	if err != nil {
		return err
	}
	c.scheduler, err = process.Start(c.nodes[0].host, filepath.Join(dataDir(c.Name), "control-plane", "kube-scheduler.log"),
		[]string{c.program("kube-scheduler"), "--kubeconfig", kubeconfig, "--leader-elect=false", "--secure-port", "0"})
	return err
}

// Down stops the cluster's programs and removes all of it.
func (c *Cluster) Down() error {
	c.stop()
	return Down(c.Name)
}

func (c *Cluster) stop() {
	c.scheduler.Stop(stopWithin)
	for _, n := range c.nodes {
		n.stop()
	}
	if c.controlPlane != nil {
		c.controlPlane.Down()
	}
}

// Down removes a cluster that any process started, and what is left of one that died.
func Down(name string) error {
	err := topology.Down(name)
	return errors.Join(err, removeCgroups(name), os.RemoveAll(dataDir(name)))
}

// removeCgroups removes the cluster's cgroups of v1; topology.Down ended their processes.
func removeCgroups(name string) error {
	roots, err := filepath.Glob(filepath.Join("/sys/fs/cgroup/*", cgroupParent, name))
	if err != nil {
		return err
	}
	for _, root := range roots {
		for range 100 { // a killed process leaves its cgroup late
			if err = removeTree(root); err == nil || errors.Is(err, os.ErrNotExist) {
				err = nil
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if err != nil {
			return fmt.Errorf("remove cgroup: %w", err)
		}
		_ = os.Remove(filepath.Dir(root)) // of the last cluster
	}
	return nil
}

// removeTree removes directories, the deepest first, and no file.
func removeTree(root string) error {
	entries, err := os.ReadDir(root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(root, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(root)
}
