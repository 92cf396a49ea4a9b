// Package cluster runs what a flow test needs around the cases: a lab cluster,
// an agent on each node, a server and a probe on every host. It resolves the
// short names of cases ("a" is node0, "a1" its second pod, "b/host" a pod on
// node1's network, "a0/vm" a process beside pod a0 that no socket hook sees).
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/testbed/topology"
)

// runDir holds what must outlive a crashed test, to be found by the next one:
// bpffs mounts, manifests and logs of each cluster.
const runDir = "/run/spillway-flows"

// ServerPorts are the ports on which every host's server answers, TCP and UDP.
// On the first it calls itself by its short name, on others "a0:8081".
var ServerPorts = []int{8080, 8081, 8090}

// Config is what a cluster is to be.
type Config struct {
	Spec   topology.Spec
	Binary string // the spillway binary; "" starts no agents
	Mode   string // --proxy-mode
	// Modes are the nodes that have another one, by node.
	Modes map[string]string
	// IptablesVariant is the variant of iptables, legacy or nft, that the nodes'
	// other programs use; "" is neither.
	IptablesVariant string
	// Flags are further flags of the agents, by node; "" is all of them.
	Flags map[string][]string
	// FromAPI has the agents watch a real API server instead of a directory.
	FromAPI bool
	// NoAgents starts none.
	NoAgents bool
	// FollowDrops writes down what the kernel drops, for Trail. It is not for floods.
	FollowDrops bool
	// Routes are ranges that outside clients route to node a.
	Routes []netip.Prefix
	// IdleUDP is how long agents' flow tables remember an idle UDP flow, and ConntrackIdleUDP how long
	// nodes' conntrack does, in whole seconds; 0: 30 s.
	IdleUDP, ConntrackIdleUDP time.Duration
}

// Cluster is a running cluster.
type Cluster struct {
	Config
	Lab *topology.Cluster
	Dir string
	API *API // nil without Config.FromAPI

	lock   *os.File
	agents map[string]*Agent
	drops  *exec.Cmd // `spillway drops`

	mu     sync.Mutex
	probes map[string]*probe.Process
}

// ModeOf is the --proxy-mode of a node's agent.
func (c *Cluster) ModeOf(node string) string { return cmp.Or(c.Modes[node], c.Mode) }

// Up builds a cluster with servers on all hosts. Agents are not started yet.
// One cluster of a name exists on a machine; Up waits for another test to be
// done with it.
func Up(ctx context.Context, cfg Config) (*Cluster, error) {
	if err := topology.RequireRoot(); err != nil {
		return nil, fmt.Errorf("flow tests build network namespaces: %w", err)
	}
	c := &Cluster{
		Config: cfg, Dir: filepath.Join(runDir, cfg.Spec.Name),
		agents: map[string]*Agent{}, probes: map[string]*probe.Process{},
	}
	if err := c.takeLock(); err != nil {
		return nil, err
	}
	if err := c.build(ctx); err != nil {
		return nil, errors.Join(err, c.Down())
	}
	return c, nil
}

func (c *Cluster) takeLock() error {
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return fmt.Errorf("lock cluster: %w", err)
	}
	f, err := os.OpenFile(c.Dir+".lock", os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return fmt.Errorf("lock cluster: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock cluster: %w", err)
	}
	c.lock = f
	return nil
}

func (c *Cluster) build(ctx context.Context) error {
	if err := c.removeLeftovers(); err != nil {
		return err
	}
	if c.FromAPI {
		c.Spec.Clients++ // the API server's machine
	}
	lab, err := topology.Up(ctx, c.Spec)
	if err != nil {
		return err
	}
	c.Lab = lab
	if c.FromAPI {
		if err := c.startAPI(ctx); err != nil {
			return err
		}
	}
	for i := range c.Spec.Clients {
		if err := c.routeClient(lab.Client(i)); err != nil {
			return err
		}
	}
	for _, host := range lab.Hosts() {
		if err := host.Do(reservePorts); err != nil {
			return err
		}
	}
	for _, node := range c.Nodes() {
		if err := c.prepareNode(node); err != nil {
			return err
		}
	}
	if err := c.followDrops(); err != nil {
		return err
	}
	return c.startServers(ctx)
}

// reservePorts keeps the ports that tests bind by number from sockets for which the kernel chooses.
func reservePorts() error {
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_reserved_ports", []byte("41000-41099"), 0); err != nil {
		return fmt.Errorf("reserve ports: %w", err)
	}
	return nil
}

// removeLeftovers removes what a crashed test has left behind.
func (c *Cluster) removeLeftovers() error {
	if err := topology.Down(c.Spec.Name); err != nil {
		return err
	}
	return c.removeDir()
}

// removeDir unmounts what is mounted below the cluster's directory and removes it.
func (c *Cluster) removeDir() error {
	mounts, err := filepath.Glob(filepath.Join(c.Dir, "*", "bpffs"))
	if err != nil {
		return err
	}
	for _, m := range append(mounts, c.apiDir()) {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", m, err)
		}
	}
	if err := os.RemoveAll(c.Dir); err != nil {
		return fmt.Errorf("remove leftovers: %w", err)
	}
	return nil
}

// Down ends everything and removes the cluster.
func (c *Cluster) Down() error {
	var errs []error
	for _, a := range c.agents {
		errs = append(errs, a.end())
	}
	c.mu.Lock()
	for _, p := range c.probes {
		errs = append(errs, p.Close())
	}
	c.mu.Unlock()
	if c.API != nil {
		c.API.Down()
	}
	c.endDrops()
	errs = append(errs, topology.Down(c.Spec.Name), c.removeDir(), c.lock.Close())
	return errors.Join(errs...)
}

// Nodes are the short names of the nodes.
func (c *Cluster) Nodes() []string {
	var names []string
	for i := range c.Spec.Nodes {
		names = append(names, string(rune('a'+i)))
	}
	return names
}

// Name is a short name taken apart.
type Name struct {
	Base  string // "a", "a0", "client0"
	Extra string // "host", "vm", "bridge", "loopback" or ""
}

// ParseName takes a short name apart.
func ParseName(short string) Name {
	base, extra, _ := strings.Cut(short, "/")
	return Name{base, extra}
}

// IsPod tells whether a short name stands for a pod with a network of its own.
func (n Name) IsPod() bool { return len(n.Base) == 2 }

// IsClient tells whether it stands for an outside client.
func (n Name) IsClient() bool { return strings.HasPrefix(n.Base, "client") }

// Host finds the host of a short name.
func (c *Cluster) Host(short string) (*topology.Host, error) {
	n := ParseName(short)
	full := n.Base
	if !n.IsClient() {
		if len(n.Base) == 0 || len(n.Base) > 2 || n.Base[0] < 'a' || n.Base[0] > 'z' {
			return nil, fmt.Errorf("find host: %q is no short name such as a, a0, b/host or client0", short)
		}
		full = "node" + strconv.Itoa(int(n.Base[0]-'a'))
		if n.IsPod() {
			full += "-pod" + n.Base[1:]
		}
	}
	host, err := c.Lab.Find(full)
	if err != nil {
		return nil, fmt.Errorf("find host %q: %w", short, err)
	}
	return c.inCgroup(host, n.Extra)
}

// inCgroup returns the host with the cgroup that the extra part asks for.
func (c *Cluster) inCgroup(host *topology.Host, extra string) (*topology.Host, error) {
	moved := *host
	switch extra {
	case "host":
		moved.Cgroup = filepath.Join(host.CgroupRoot, "host-network-pod")
	case "vm":
		moved.Cgroup = filepath.Join(filepath.Dir(filepath.Dir(host.Cgroup)), "outside-"+host.Name)
	default:
		return host, nil
	}
	if err := os.MkdirAll(moved.Cgroup, 0o755); err != nil {
		return nil, fmt.Errorf("make cgroup: %w", err)
	}
	return &moved, nil
}
