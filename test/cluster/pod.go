package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Pod is a running Pod on a node.
type Pod struct {
	Name, IP string
	node     *Node
	cgroup   string // cgroup2 of its first container
	pid      int    // a process of that container
}

// Pods returns the running Pods of a namespace that a label selects.
func (c *Cluster) Pods(ctx context.Context, namespace, selector string) ([]*Pod, error) {
	text, err := c.Kubectl(ctx, "--namespace", namespace, "get", "pods", "--selector", selector,
		"--field-selector", "status.phase=Running", "--output",
		`jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.spec.nodeName} {.status.podIP} {.status.containerStatuses[0].containerID}{"\n"}{end}`)
	if err != nil {
		return nil, err
	}
	var pods []*Pod
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) != 5 {
			return nil, fmt.Errorf("list Pods: %q has no container that runs", line)
		}
		node, err := c.FindNode(f[2])
		if err != nil {
			return nil, err
		}
		_, container, _ := strings.Cut(f[4], "://")
		pod, err := node.pod(f[0], f[3], "pod"+f[1], container)
		if err != nil {
			return nil, err
		}
		pods = append(pods, pod)
	}
	return pods, nil
}

// PodOfEachNode returns Pods as Pods does, by the names of their nodes. No node may have
// two.
func (c *Cluster) PodOfEachNode(ctx context.Context, namespace, selector string) (map[string]*Pod, error) {
	list, err := c.Pods(ctx, namespace, selector)
	if err != nil {
		return nil, err
	}
	pods := map[string]*Pod{}
	for _, pod := range list {
		if other := pods[pod.Node()]; other != nil {
			return nil, fmt.Errorf("list Pods: %s has %s and %s, want one", pod.Node(), other.Name, pod.Name)
		}
		pods[pod.Node()] = pod
	}
	return pods, nil
}

// FindNode returns the node of that name.
func (c *Cluster) FindNode(name string) (*Node, error) {
	for _, n := range c.nodes {
		if n.Name() == name {
			return n, nil
		}
	}
	return nil, fmt.Errorf("find node: cluster %s has no %q", c.Name, name)
}

// pod finds a container's processes by its cgroup: kubepods/[CLASS/]podUID/CONTAINER.
func (n *Node) pod(name, ip, uid, container string) (*Pod, error) {
	for _, class := range []string{"", "burstable", "besteffort"} {
		cgroup := filepath.Join(n.host.CgroupRoot, "kubepods", class, uid, container)
		text, err := os.ReadFile(filepath.Join(cgroup, "cgroup.procs"))
		if err != nil {
			continue
		}
		first, _, _ := strings.Cut(string(text), "\n")
		pid, err := strconv.Atoi(first)
		if err != nil {
			return nil, fmt.Errorf("find process of Pod %s: %w", name, err)
		}
		return &Pod{name, ip, n, cgroup, pid}, nil
	}
	return nil, fmt.Errorf("find cgroup of Pod %s on %s: no container %s", name, n.Name(), container)
}

// Kill kills the container's first process, as the kernel's OOM killer does.
func (p *Pod) Kill() error { return syscall.Kill(p.pid, syscall.SIGKILL) }

// Node returns the name of the Pod's node.
func (p *Pod) Node() string { return p.node.Name() }

// PID returns the id, on the machine, of the container's first process.
func (p *Pod) PID() int { return p.pid }

// Command prepares a process in the Pod's network namespace and cgroup2. It sees the
// files of the caller, so it may be a program that the image lacks. The close function is
// for after the start.
func (p *Pod) Command(ctx context.Context, argv ...string) (cmd *exec.Cmd, close func(), err error) {
	dir, err := os.Open(p.cgroup)
	if err != nil {
		return nil, nil, fmt.Errorf("run in Pod %s: %w", p.Name, err)
	}
	cmd = exec.CommandContext(ctx, "nsenter", append([]string{"--target", strconv.Itoa(p.pid), "--net", "--"}, argv...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	return cmd, func() { dir.Close() }, nil
}
