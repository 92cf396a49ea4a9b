package controlplane

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"spillway.dev/spillway/test/testbed/process"
	"spillway.dev/spillway/test/testbed/topology"
)

// Config configures the control plane.
type Config struct {
	// Dir is for keys, logs and etcd's data; it must exist. On a tmpfs etcd
	// need not wait for a disk.
	Dir string
	// Programs is the directory that hack/peers filled; "" is that of the built programs.
	Programs string
	// Etcd is the path of etcd; "" is the one in PATH.
	Etcd string
	// Host runs the programs in one host of a lab cluster; other hosts reach the API
	// server at its addresses. nil uses free ports of loopback.
	Host *topology.Host
	// ServiceCIDRs are one range, or one a family; nil is DefaultServiceCIDRs.
	ServiceCIDRs []netip.Prefix
	// Controllers names the controllers that kube-controller-manager runs;
	// nil does not start it.
	Controllers []string
	// ServiceAccounts gives each Pod an account, as a kubelet needs it. Controllers must
	// create the accounts.
	ServiceAccounts bool
	// These are added to the command lines.
	APIServerArgs, ControllerManagerArgs []string
	// StartWithin bounds the start of each program; 0 is three minutes.
	StartWithin time.Duration
}

// DefaultServiceCIDRs have room for every benchmark.
var DefaultServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd96::/108")}

// ControlPlane is a running control plane. Its methods are for one goroutine
// at a time.
type ControlPlane struct {
	cfg        Config
	ca         *authority
	addrs      []netip.Addr // addresses of the API server; the first is in the kubeconfig
	etcdPort   string
	peerPort   string
	port       string // of the API server
	rest       *rest.Config
	etcd       *process.Process
	apiserver  *process.Process
	controller *process.Process
}

// Program returns the path of a program that hack/peers has built.
func Program(name string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find %s: %w", name, err)
	}
	found, _ := filepath.Glob(filepath.Join(cache, "spillway", "peers", "*", name))
	if len(found) == 0 {
		return "", fmt.Errorf("find %s: it is not built: run \"hack/peers %[1]s\"", name)
	}
	return found[len(found)-1], nil
}

// Up starts a control plane and waits until it serves.
func Up(ctx context.Context, cfg Config) (*ControlPlane, error) {
	if cfg.Etcd == "" {
		cfg.Etcd = "etcd"
	}
	if _, err := exec.LookPath(cfg.Etcd); err != nil {
		return nil, fmt.Errorf("find etcd: no %s in PATH: run \"hack/deps test\", or install the package etcd-server", cfg.Etcd)
	}
	if cfg.Programs == "" {
		apiserver, err := Program("kube-apiserver")
		if err != nil {
			return nil, err
		}
		cfg.Programs = filepath.Dir(apiserver)
	}
	if cfg.ServiceCIDRs == nil {
		cfg.ServiceCIDRs = DefaultServiceCIDRs
	}
	if cfg.StartWithin == 0 {
		cfg.StartWithin = 3 * time.Minute
	}
	for try := 1; ; try++ {
		c := &ControlPlane{cfg: cfg}
		err := c.up(ctx)
		if err == nil {
			return c, nil
		}
		c.Down()
		// Another program may take a free port before this one opens it.
		if try == 3 || !strings.Contains(err.Error(), "address already in use") {
			return nil, fmt.Errorf("start control plane: %w", err)
		}
	}
}

func (c *ControlPlane) up(ctx context.Context) error {
	if err := c.choosePorts(); err != nil {
		return err
	}
	if err := c.writeKeys(); err != nil {
		return err
	}
	if err := c.startEtcd(ctx); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	if c.cfg.Controllers != nil {
		return c.startControllerManager()
	}
	return nil
}

// choosePorts returns the usual ports in a private namespace, and free ones on a shared
// loopback.
func (c *ControlPlane) choosePorts() error {
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if c.cfg.Host != nil {
		c.addrs = append(c.cfg.Host.Addrs(), loopback)
		c.etcdPort, c.peerPort, c.port = "2379", "2380", "6443"
		return nil
	}
	c.addrs = []netip.Addr{loopback}
	for _, port := range []*string{&c.etcdPort, &c.peerPort, &c.port} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return fmt.Errorf("find a free port: %w", err)
		}
		defer l.Close() // when all three are known: they must differ
		_, *port, _ = net.SplitHostPort(l.Addr().String())
	}
	return nil
}

// Server returns the URL of the API server.
func (c *ControlPlane) Server() string {
	return "https://" + net.JoinHostPort(c.addrs[0].String(), c.port)
}

// REST returns a client-go configuration with full privileges, for the process
// that called Up. It has no rate limit.
func (c *ControlPlane) REST() *rest.Config { return rest.CopyConfig(c.rest) }

// Down ends all programs. Only the directory remains.
func (c *ControlPlane) Down() {
	c.controller.Stop(2 * time.Second)
	c.StopAPIServer()
	c.etcd.Kill() // it has no client left
	c.controller, c.etcd = nil, nil
}

// Processes returns the ids of the programs that run.
func (c *ControlPlane) Processes() []int {
	var ids []int
	for _, p := range []*process.Process{c.etcd, c.apiserver, c.controller} {
		if p != nil {
			ids = append(ids, p.ID())
		}
	}
	return ids
}

// Log returns the end of the output of a program, "etcd", "kube-apiserver" or
// "kube-controller-manager", since its last start.
func (c *ControlPlane) Log(program string) string {
	text, err := os.ReadFile(c.path(program + ".log"))
	if err != nil {
		return err.Error()
	}
	const most = 4 << 10
	return string(text[max(0, len(text)-most):])
}

func (c *ControlPlane) path(name string) string { return filepath.Join(c.cfg.Dir, name) }

func (c *ControlPlane) program(name string) string { return filepath.Join(c.cfg.Programs, name) }
