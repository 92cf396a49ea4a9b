package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/instance"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// Agent starts, ends and queries the spillway agent of one node.
type Agent struct {
	Node      string // short name
	Manifests string // directory that the agent watches
	BPFFS     string // directory of the instance's pins
	Mount     string // mount point of the agent's own bpffs
	Log       string // file with the agent's output

	cluster *Cluster
	host    *topology.Host
	cmd     *topology.Cmd
	done    chan error
}

// readyWithin bounds the wait for an agent to become healthy or to end. It only ends
// tests that hang: an emulated CPU (hack/vm) takes half a minute to verify the programs,
// and a busy machine has taken a minute and a half.
const readyWithin = 3 * time.Minute

// Build builds spillway from this tree into dir and returns the path of the
// binary. If given is not empty, Build builds nothing and returns the absolute
// path of given.
func Build(ctx context.Context, dir, given string) (string, error) {
	if given != "" {
		return filepath.Abs(given)
	}
	binary := filepath.Join(dir, "spillway")
	// A test of another module does not have what spillway is built from.
	module, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "spillway.dev/spillway").Output()
	if err != nil {
		return "", fmt.Errorf("find the module of spillway: %w", err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-ldflags=-s -w", "-o", binary, "./cmd/spillway")
	cmd.Dir = strings.TrimSpace(string(module))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build spillway: %w\n%s", err, out)
	}
	return binary, nil
}

// prepareNode makes the directories of a node's agent.
func (c *Cluster) prepareNode(node string) error {
	host, err := c.Host(node)
	if err != nil {
		return err
	}
	dir := filepath.Join(c.Dir, node)
	a := &Agent{
		Node: node, Manifests: filepath.Join(dir, "manifests"), BPFFS: filepath.Join(dir, "bpffs", "spillway"),
		Mount: filepath.Join(dir, "bpffs"),
		Log:   filepath.Join(dir, "agent.log"), cluster: c, host: host,
	}
	for _, d := range []string{a.Manifests, a.Mount} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return fmt.Errorf("prepare node %s: %w", node, err)
		}
	}
	// Each node has its own bpffs, so that pin paths do not collide.
	if err := unix.Mount("bpf", a.Mount, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount bpffs on %s: %w", a.Mount, err)
	}
	if err := host.Do(unlimitICMP); err != nil {
		return fmt.Errorf("prepare node %s: %w", node, err)
	}
	if err := host.Do(c.rememberUDP); err != nil {
		return fmt.Errorf("prepare node %s: %w", node, err)
	}
	if err := c.useIptables(host); err != nil {
		return err
	}
	nodes, err := c.Lab.NodesYAML()
	if err != nil {
		return err
	}
	c.agents[node] = a
	return a.Write("nodes.yaml", nodes)
}

// unlimitICMP turns off the namespace's rate limits of ICMP errors. With them the
// kernel sends a client a few errors, or all clients a burst of 50, and then none for
// a while, which looks like a drop.
func unlimitICMP() error {
	for file, value := range map[string]string{
		"ipv4/icmp_ratelimit": "0", "ipv6/icmp/ratelimit": "0",
		"ipv4/icmp_msgs_per_sec": "1000000", "ipv4/icmp_msgs_burst": "1000000", // both families
	} {
		err := os.WriteFile("/proc/sys/net/"+file, []byte(value), 0)
		if errors.Is(err, fs.ErrNotExist) && strings.Contains(file, "icmp_msgs") {
			continue // an older kernel has these for the whole machine
		}
		if err != nil {
			return fmt.Errorf("lift ICMP limit: %w", err)
		}
	}
	return nil
}

// rememberUDP sets how long conntrack remembers an idle UDP flow in the namespace.
func (c *Cluster) rememberUDP() error {
	if c.ConntrackIdleUDP == 0 {
		return nil
	}
	return kernel.WriteSysctl("net.netfilter.nf_conntrack_udp_timeout", strconv.Itoa(int(c.ConntrackIdleUDP.Seconds())))
}

// useIptables creates kubelet's chain on a node, in the cluster's variant of
// iptables. The agent recognizes the variant by it.
func (c *Cluster) useIptables(host *topology.Host) error {
	if c.IptablesVariant == "" {
		return nil
	}
	cmd := host.Command(context.Background(), "iptables-"+c.IptablesVariant+"-restore", "--noflush", "--wait")
	cmd.Stdin = strings.NewReader("*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("use iptables %s on %s: %w: %s", c.IptablesVariant, host.Name, err, out)
	}
	return nil
}

// Agent returns the agent of a node.
func (c *Cluster) Agent(node string) *Agent { return c.agents[node] }

// StartAgents starts the agent of every node and waits until all are ready.
func (c *Cluster) StartAgents(ctx context.Context) error {
	for _, node := range c.Nodes() {
		if err := c.agents[node].Start(ctx); err != nil {
			return err
		}
	}
	for _, node := range c.Nodes() {
		if err := c.agents[node].WaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Socket returns the path of the agent's API: the default of an instance with its own --bpffs.
func (a *Agent) Socket() string { return instance.File("/run/spillway", a.BPFFS, ".sock") }

// Args returns the agent's arguments without the name of the program.
func (a *Agent) Args() []string {
	args := agent.Args(a.host, a.cluster.ModeOf(a.Node), a.BPFFS)
	if a.cluster.API != nil {
		args = append(args, "--kubeconfig", a.cluster.API.Kubeconfig)
	} else {
		args = append(args, "--manifests", a.Manifests)
	}
	if idle := a.cluster.IdleUDP; idle != 0 {
		args = append(args, "--conntrack-udp-timeout="+idle.String())
	}
	args = append(args, a.cluster.Flags[""]...)
	return append(args, a.cluster.Flags[a.Node]...)
}

// Start starts the agent. It does not wait for it to be ready.
func (a *Agent) Start(ctx context.Context) error {
	if a.cmd != nil {
		return fmt.Errorf("start agent on %s: it runs already", a.Node)
	}
	log, err := os.OpenFile(a.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("start agent on %s: %w", a.Node, err)
	}
	defer log.Close()
	cmd := a.host.Command(context.WithoutCancel(ctx), append([]string{a.cluster.Binary}, a.Args()...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start agent: %w", err)
	}
	a.cmd, a.done = cmd, make(chan error, 1)
	go func(done chan<- error) { done <- cmd.Wait() }(a.done)
	return nil
}

// Signal ends the agent with a signal and waits for its end. After SIGTERM its
// exit code must be 0.
func (a *Agent) Signal(sig syscall.Signal) error {
	if a.cmd == nil {
		return nil
	}
	if err := a.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %v to agent on %s: %w", sig, a.Node, err)
	}
	defer func() { a.cmd = nil }()
	select {
	case err := <-a.done:
		if sig == syscall.SIGTERM && err != nil {
			return fmt.Errorf("end agent on %s: %w; its log ends with:\n%s", a.Node, err, a.Tail())
		}
		return nil
	case <-time.After(readyWithin):
		_ = a.cmd.Process.Kill()
		<-a.done
		return fmt.Errorf("end agent on %s: it still runs %v after %v", a.Node, readyWithin, sig)
	}
}

// Suspend stops the agent with SIGSTOP. Resume continues it.
func (a *Agent) Suspend() error { return a.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume continues a suspended agent.
func (a *Agent) Resume() error { return a.cmd.Process.Signal(syscall.SIGCONT) }

func (a *Agent) end() error { return a.Signal(syscall.SIGTERM) }

// Cleanup runs spillway agent --cleanup for the node.
func (a *Agent) Cleanup(ctx context.Context) error {
	args := append([]string{a.cluster.Binary}, a.Args()...)
	out, err := a.host.Command(ctx, append(args, "--cleanup")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("clean up on %s: %w: %s", a.Node, err, out)
	}
	return nil
}

// Ended returns an error if the agent has ended by itself.
func (a *Agent) Ended() error {
	select {
	case err := <-a.done:
		a.done <- err
		return fmt.Errorf("agent on %s ended (%v); its log ends with:\n%s", a.Node, err, a.Tail())
	default:
		return nil
	}
}

// WaitReady waits until the agent is healthy and has written its Services to the
// kernel. Health alone is not enough: an agent that still loads its dataplane is
// healthy.
func (a *Agent) WaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	begun := time.Now()
	var last error
	for {
		if err := a.Ended(); err != nil {
			return err
		}
		if last = agent.Ready(ctx, a.host); last == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("agent on %s is not ready after %v (%w); its log ends with:\n%s", a.Node,
				time.Since(begun).Round(time.Second), last, a.Tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// LastSync returns when the agent's last sync ended; zero if there was none.
func (a *Agent) LastSync(ctx context.Context) (time.Time, error) { return agent.LastSync(ctx, a.host) }

// Pending returns the number of changes of Services that are not in the kernel yet.
func (a *Agent) Pending(ctx context.Context) (int, error) {
	n, err := agent.Metric(ctx, a.host, "kubeproxy_sync_proxy_rules_service_changes_pending", "")
	return int(n), err
}

// Metrics fetches the agent's metrics as text.
func (a *Agent) Metrics(ctx context.Context) (string, error) {
	return agent.Get(ctx, a.host, agent.MetricsPort, "/metrics")
}

// Tail returns the last lines of the agent's log.
func (a *Agent) Tail() string {
	text, err := os.ReadFile(a.Log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

// Write writes a manifest beside the directory and renames it into the directory, so
// that the agent never reads a part of it. Without content it removes the file.
func (a *Agent) Write(name string, content []byte) error {
	file := filepath.Join(a.Manifests, name)
	if len(content) == 0 {
		if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove manifest: %w", err)
		}
		return nil
	}
	beside := filepath.Join(filepath.Dir(a.Manifests), name+".new")
	if err := os.WriteFile(beside, content, 0o644); err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	if err := os.Rename(beside, file); err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	return nil
}
