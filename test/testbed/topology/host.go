package topology

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// Kind distinguishes nodes, pods and clients.
type Kind string

// The kinds of Host.
const (
	KindNode   Kind = "node"
	KindPod    Kind = "pod"
	KindClient Kind = "client"
)

// DirVariable is the environment variable in which a process started by
// Host.Command finds a directory for its temporary files. Down removes it.
const DirVariable = "SPILLWAY_LAB_DIR"

// Host is one node, pod or outside client: a network namespace and a cgroup.
type Host struct {
	Cluster   string     `json:"-"`
	Name      string     `json:"name"` // node0, node0-pod1, client0
	Kind      Kind       `json:"kind"`
	Index     int        `json:"index"`          // among the hosts of its kind (pods: on its node)
	Node      string     `json:"node,omitempty"` // the node it is or runs on, "" for a client
	Namespace string     `json:"namespace"`      // a name that ip netns knows
	Cgroup    string     `json:"cgroup"`         // cgroup of its processes, an absolute path
	IPv4      netip.Addr `json:"ipv4,omitzero"`
	IPv6      netip.Addr `json:"ipv6,omitzero"`
	// CgroupRoot is the cgroup of the host and of everything that runs on it: a node's
	// contains its pods too. For pods and clients it is Cgroup.
	CgroupRoot string         `json:"cgroupRoot"`
	PodCIDRs   []netip.Prefix `json:"podCIDRs,omitempty"`   // of a node
	Zone       string         `json:"zone,omitempty"`       // of a node
	NodeDevice string         `json:"nodeDevice,omitempty"` // of a pod: its veth on the node

	// These have both families, whatever the spec selects: the plan derives hardware
	// addresses from them.
	addr4, addr6       netip.Addr
	podCIDR4, podCIDR6 netip.Prefix
	families           families
}

func (h *Host) setAddrs(v4, v6 netip.Addr) {
	h.addr4, h.addr6 = v4, v6
	if h.families.v4 {
		h.IPv4 = v4
	}
	if h.families.v6 {
		h.IPv6 = v6
	}
}

// Addrs returns the host's addresses, IPv4 first.
func (h *Host) Addrs() []netip.Addr { return pick(h.families, h.addr4, h.addr6) }

// Addr returns the host's address of the family of another address.
func (h *Host) Addr(like netip.Addr) netip.Addr {
	if like.Unmap().Is4() {
		return h.IPv4
	}
	return h.IPv6
}

// Do runs a function in the host's network namespace, on the calling goroutine with its
// thread locked. Sockets that it opens belong to the host for good. Goroutines that it
// starts do not. The process stays in its own cgroup, so the host's cgroup socket hooks
// do not see those sockets; use Command if they must.
func (h *Host) Do(fn func() error) error {
	return inNamespace(h.Namespace, fn)
}

// Dial opens a connection from the host's namespace.
func (h *Host) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = h.Do(func() error {
		var d net.Dialer
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen opens a stream listener in the host's namespace.
func (h *Host) Listen(ctx context.Context, network, address string) (l net.Listener, err error) {
	err = h.Do(func() error {
		var lc net.ListenConfig
		l, err = lc.Listen(ctx, network, address)
		return err
	})
	return l, err
}

// ListenPacket opens a packet socket in the host's namespace.
func (h *Host) ListenPacket(ctx context.Context, network, address string) (c net.PacketConn, err error) {
	err = h.Do(func() error {
		var lc net.ListenConfig
		c, err = lc.ListenPacket(ctx, network, address)
		return err
	})
	return c, err
}

// ConntrackCount returns the number of entries in the conntrack table of the
// host's namespace; 0 on a kernel without conntrack.
func (h *Host) ConntrackCount() (int, error) {
	var text []byte
	err := h.Do(func() (err error) {
		text, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if os.IsNotExist(err) {
			text, err = []byte("0"), nil
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read conntrack count of %s: %w", h.Name, err)
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// Processes returns the ids of the processes in the host's cgroup.
func (h *Host) Processes() ([]int, error) { return cgroupProcesses(h.Cgroup) }

// Cmd is an exec.Cmd whose process starts in a host's namespace and cgroup.
type Cmd struct {
	*exec.Cmd
	host *Host
}

// Command prepares a process in the host's network namespace and cgroup. Its
// argv must not be empty. Down ends it if it still runs then.
func (h *Host) Command(ctx context.Context, argv ...string) *Cmd {
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.Env = append(os.Environ(), DirVariable+"="+tempDir(h.Cluster))
	return &Cmd{Cmd: c, host: h}
}

// Start starts the process as exec.Cmd.Start does. It is born in the cgroup
// (clone3 with CLONE_INTO_CGROUP), so no socket of it escapes cgroup hooks.
func (c *Cmd) Start() error {
	dir, err := os.Open(c.host.Cgroup)
	if err != nil {
		return fmt.Errorf("start %s on %s: %w", c.Args[0], c.host.Name, err)
	}
	defer dir.Close()
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.UseCgroupFD, c.SysProcAttr.CgroupFD = true, int(dir.Fd())
	if err := c.host.Do(c.Cmd.Start); err != nil {
		return fmt.Errorf("start %s on %s: %w", c.Args[0], c.host.Name, err)
	}
	return nil
}

// Run starts the process and waits for its end.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the process and returns its standard output. On failure the error contains
// its standard error.
func (c *Cmd) Output() ([]byte, error) {
	var out, errs strings.Builder
	c.Stdout = &out
	if c.Stderr == nil {
		c.Stderr = &errs
	}
	err := c.Run()
	if msg := strings.TrimSpace(errs.String()); err != nil && msg != "" {
		err = fmt.Errorf("run %s on %s: %w: %s", c.Args[0], c.host.Name, err, msg)
	}
	return []byte(out.String()), err
}

// CombinedOutput runs the process and returns its standard output and error.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out strings.Builder
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return []byte(out.String()), err
}

// Exec turns the calling process into argv on the host: it moves to the host's
// namespace and cgroup and calls execve. It returns only an error.
func (h *Host) Exec(argv []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return fmt.Errorf("run on %s: %w", h.Name, err)
	}
	if err := joinCgroup(h.Cgroup); err != nil {
		return err
	}
	env := append(os.Environ(), DirVariable+"="+tempDir(h.Cluster))
	return h.Do(func() error {
		if err := syscall.Exec(path, argv, env); err != nil {
			return fmt.Errorf("run %s on %s: %w", path, h.Name, err)
		}
		return nil
	})
}
