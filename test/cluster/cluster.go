package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/cluster/programs"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/process"
	"spillway.dev/spillway/test/testbed/topology"
)

// Config configures a cluster. Zero values mean the default.
type Config struct {
	Name  string // a DNS label of at most 20 characters; DefaultName
	Nodes int    // 3
	CNI   CNI    // FlannelVXLAN
	Proxy Proxy  // Spillway
	// Families are the address families of nodes, pods and Services; IPv4.
	Families Families
	// Kubeadm makes the control plane and the nodes with kubeadm, which installs its own
	// CoreDNS.
	Kubeadm bool
	// KubeadmInit, with Kubeadm, replaces kubeadm init on the first node and the installation
	// of the proxy.
	KubeadmInit func(context.Context, *Cluster) error
	Values      []string // of Spillway's chart, in the form of helm's --set
	Image       string   // archive of Spillway's image; bin/image.tar, which make image writes
	// Images are added to those of the cluster itself, by the short names of package
	// images.
	Images []string
	// Prepared is what Prepare returned for this Config; nil has Up prepare, which may need
	// the machine's own network.
	Prepared *Prepared
	Wait     time.Duration // at most, for each thing that starts; 3 minutes
	Out      io.Writer     // a line about each step; none
}

// DefaultName is the name of a cluster that has no other.
const DefaultName = "k8s"

// WithDefaults returns a Config with defaults for zero values.
func (cfg Config) WithDefaults() Config {
	if cfg.Name == "" {
		cfg.Name = DefaultName
	}
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	if cfg.CNI == "" {
		cfg.CNI = FlannelVXLAN
	}
	if cfg.Proxy == "" {
		cfg.Proxy = Spillway
	}
	if cfg.Families == "" {
		cfg.Families = IPv4
	}
	if cfg.Wait == 0 {
		cfg.Wait = 3 * time.Minute
	}
	if cfg.Out == nil {
		cfg.Out = io.Discard
	}
	return cfg
}

// Validate returns an error of one line that names the invalid field.
func (cfg Config) Validate() error {
	if !slices.Contains(CNIs, cfg.CNI) {
		return fmt.Errorf("cluster: CNI: %q is none of %q", cfg.CNI, CNIs)
	}
	if !slices.Contains(Proxies, cfg.Proxy) {
		return fmt.Errorf("cluster: proxy: %q is none of %q", cfg.Proxy, Proxies)
	}
	if !slices.Contains(AllFamilies, cfg.Families) {
		return fmt.Errorf("cluster: families: %q is none of %q", cfg.Families, AllFamilies)
	}
	if cfg.Families == Mixed && cfg.Nodes != 3 {
		return fmt.Errorf("cluster: families: %q needs 3 nodes, not %d", Mixed, cfg.Nodes)
	}
	if cfg.Families == Mixed && cfg.CNI != Bridge {
		return fmt.Errorf("cluster: families: %q needs CNI %q: flannel gives every node the same families", Mixed, Bridge)
	}
	if cfg.Kubeadm && cfg.Families != IPv4 {
		return fmt.Errorf("cluster: kubeadm: it is used only with families %q, not %q", IPv4, cfg.Families)
	}
	if cfg.Kubeadm && cfg.Proxy != Spillway {
		return fmt.Errorf("cluster: kubeadm: it is used only with proxy %q, not %q", Spillway, cfg.Proxy)
	}
	if cfg.KubeadmInit != nil && !cfg.Kubeadm {
		return errors.New("cluster: KubeadmInit: it is used only with Kubeadm")
	}
	return nil // package topology checks the name and the number of nodes
}

// FindImage returns the archive of Spillway's image, or an error that says how to make it.
func (cfg Config) FindImage() (string, error) {
	image := cfg.Image
	if image == "" {
		root, err := programs.Root()
		if err != nil {
			return "", err
		}
		image = filepath.Join(root, "bin/image.tar")
	}
	if _, err := os.Stat(image); err != nil {
		return "", fmt.Errorf("find Spillway's image: %w: run \"make image\", or name another archive", err)
	}
	return image, nil
}

// Cluster is a running cluster. Its control plane runs on the first node.
type Cluster struct {
	Config
	topology     *topology.Cluster
	controlPlane *controlplane.ControlPlane
	scheduler    *process.Process
	nodes        []*Node
	root         string // of the repository
}

const (
	dataRoot     = "/var/lib/spillway-cluster"
	cgroupParent = "spillway-cluster"
)

// Create makes the network of a cluster. Up starts its programs.
func Create(ctx context.Context, cfg Config) (*topology.Cluster, error) {
	return topology.Up(ctx, cfg.WithDefaults().spec())
}

// Up starts a cluster, installs the CNI, Spillway and CoreDNS, and waits until their Pods
// are Ready. After an error it returns what has started, for Down.
func Up(ctx context.Context, cfg Config) (*Cluster, error) {
	c := &Cluster{Config: cfg.WithDefaults()}
	if err := c.Validate(); err != nil {
		return c, err
	}
	if err := c.up(ctx); err != nil {
		return c, fmt.Errorf("start cluster %s: %w", c.Name, err)
	}
	return c, nil
}

func (c *Cluster) up(ctx context.Context) (err error) {
	if c.root, err = programs.Root(); err != nil {
		return err
	}
	if c.Prepared == nil {
		if c.Prepared, err = Prepare(ctx, c.Config); err != nil {
			return err
		}
	}
	if err := c.Prepared.check(c.Config); err != nil {
		return err
	}
	if c.topology, err = Create(ctx, c.Config); err != nil {
		return err
	}
	for i := range c.Nodes {
		host := c.topology.Node(i)
		c.nodes = append(c.nodes, &Node{cluster: c, host: host, dir: filepath.Join(Dir(c.Name), host.Name)})
	}
	type step struct {
		name string
		do   func(context.Context) error
	}
	steps := []step{
		{"start nodes", func(ctx context.Context) error { return c.each(ctx, (*Node).start) }},
		{"import images", c.importImages},
		{"give nodes their families", c.removeFamilies},
	}
	if c.Kubeadm {
		steps = append(steps, step{"run kubeadm init and kubeadm join", c.startKubeadm})
	} else {
		steps = append(steps,
			step{"start control plane", c.startControlPlane},
			step{"start kubelets", func(ctx context.Context) error { return c.each(ctx, (*Node).StartKubelet) }})
	}
	steps = append(steps, step{"install CNI " + string(c.CNI), c.installCNI})
	if c.KubeadmInit == nil {
		steps = append(steps, step{"install " + string(c.Proxy), c.installProxy})
	}
	for _, step := range append(steps, step{"install CoreDNS", c.installDNS}) {
		fmt.Fprintln(c.Out, step.name)
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
	return c.ImportImage(ctx, c.Prepared.Archives...)
}

// ImportImage gives every node images from archives.
func (c *Cluster) ImportImage(ctx context.Context, archives ...string) error {
	return c.each(ctx, func(n *Node, ctx context.Context) error {
		for _, archive := range archives {
			if err := n.ImportImage(ctx, archive); err != nil {
				return err
			}
		}
		return nil
	})
}

func (c *Cluster) program(name string) string { return filepath.Join(c.Prepared.Programs, name) }

// Node returns the i-th node.
func (c *Cluster) Node(i int) *Node { return c.nodes[i] }

// AllNodes returns the nodes.
func (c *Cluster) AllNodes() []*Node { return c.nodes }

// Client returns the host outside the cluster.
func (c *Cluster) Client() *topology.Host { return c.topology.Client(0) }

// APIServer returns the API server's address, whose port is 6443.
func (c *Cluster) APIServer() string { return c.topology.Node(0).Addrs()[0].String() }

// ControlPlane returns the control plane, to stop and start its programs.
func (c *Cluster) ControlPlane() *controlplane.ControlPlane { return c.controlPlane }

func (c *Cluster) startControlPlane(ctx context.Context) (err error) {
	dir := filepath.Join(Dir(c.Name), "control-plane")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	args := []string{
		"--authorization-mode", "Node", // beside RBAC
		"--allow-privileged",
		"--enable-admission-plugins", "NodeRestriction",
		"--kubelet-preferred-address-types", "InternalIP",
	}
	if c.Families == Mixed {
		args = append(args, "--bind-address", "::")
	}
	c.controlPlane, err = controlplane.Up(ctx, controlplane.Config{
		Dir:             dir,
		Programs:        c.Prepared.Programs,
		Host:            c.nodes[0].host,
		ServiceCIDRs:    c.serviceCIDRs(),
		ServiceAccounts: true,
		APIServerArgs:   args,
		Controllers:     []string{"*"},
		ControllerManagerArgs: []string{
			"--allocate-node-cidrs", "--cluster-cidr", join(c.clusterCIDRs()),
			"--service-cluster-ip-range", join(c.serviceCIDRs()),
			"--use-service-account-credentials",
		},
		StartWithin: c.Wait,
	})
	if err != nil {
		return err
	}
	kubeconfig, err := c.controlPlane.AdminKubeconfig()
	if err != nil {
		return err
	}
	if err := copyFile(kubeconfig, Kubeconfig(c.Name)); err != nil {
		return err
	}
	return c.startScheduler()
}

// Dir returns the directory of a cluster's files: logs, keys, and the nodes' disks.
func Dir(name string) string { return filepath.Join(dataRoot, name) }

// Kubeconfig returns the path of the kubeconfig with full rights.
func Kubeconfig(name string) string { return filepath.Join(Dir(name), "admin.kubeconfig") }

func (c *Cluster) startScheduler() error {
	kubeconfig, err := c.controlPlane.Kubeconfig(controlplane.User{Name: "system:kube-scheduler", Groups: []string{"system:masters"}})
	if err != nil {
		return err
	}
	c.scheduler, err = process.Start(c.nodes[0].host, filepath.Join(Dir(c.Name), "control-plane", "kube-scheduler.log"),
		[]string{c.program("kube-scheduler"), "--kubeconfig", kubeconfig, "--leader-elect=false", "--secure-port", "0"})
	return err
}

// Down stops the cluster's programs and removes all of it.
func (c *Cluster) Down() error {
	c.Stop()
	return Down(c.Name)
}

// Stop ends the cluster's programs, after errors of Up too. Everything else remains for
// Down.
func (c *Cluster) Stop() {
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
	return errors.Join(err, removeCgroups("/sys/fs/cgroup", name), os.RemoveAll(Dir(name)))
}

// removeCgroups removes the cluster's cgroups of v1, if the machine has any: they are below
// the directories of mount. topology.Down removed those of cgroup2 and ended all processes.
func removeCgroups(mount, name string) error {
	roots, err := filepath.Glob(filepath.Join(mount, "*", cgroupParent, name))
	if err != nil {
		return err
	}
	for _, root := range roots {
		remove := removeTree
		if !onCgroupfs(root) { // node.sh took plain directories for hierarchies, and left files there
			remove = os.RemoveAll
		}
		for range 100 { // a killed process leaves its cgroup late
			if err = remove(root); err == nil || errors.Is(err, os.ErrNotExist) {
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

// onCgroupfs reports whether a directory is a cgroup. Programs and operators may make plain
// directories beside the mounts of cgroup v1.
func onCgroupfs(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && (fs.Type == unix.CGROUP_SUPER_MAGIC || fs.Type == unix.CGROUP2_SUPER_MAGIC)
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
