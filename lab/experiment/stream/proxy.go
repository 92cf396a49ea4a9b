package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

// proxy is a running Spillway agent or kube-proxy.
type proxy struct {
	node  *topology.Host
	cmd   *topology.Cmd
	log   bytes.Buffer
	done  chan struct{}
	bpffs string // of an agent in mode ebpf
	table string // else the nft table, with its family
}

// start starts the proxy of a mode on a node.
func (b *bench) start(node int, mode string) (*proxy, error) {
	kubeconfig, err := b.plane.AdminKubeconfig()
	if err != nil {
		return nil, err
	}
	p := &proxy{node: b.harness.Cluster.Node(node), done: make(chan struct{})}
	argv := []string{"--proxy-mode", strings.TrimPrefix(mode, kubeProxy), "--kubeconfig", kubeconfig, "--hostname-override", p.node.Name,
		"--cluster-cidr", b.harness.Cluster.Spec.ClusterCIDR4.String()}
	if strings.HasPrefix(mode, kubeProxy) {
		program, err := controlplane.Program("kube-proxy")
		if err != nil {
			return nil, err
		}
		p.table = "ip kube-proxy"
		// No setting of the whole machine is changed.
		argv = append([]string{program}, append(argv, "--conntrack-max-per-core", "0", "--conntrack-min", "0",
			"--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0")...)
	} else {
		program, err := harness.Spillway()
		if err != nil {
			return nil, err
		}
		dir := b.harness.Path("bpf/" + p.node.Name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make directory for pinned objects: %w", err)
		}
		p.table = "inet spillway"
		if mode == "ebpf" {
			p.bpffs = dir
		}
		argv = append([]string{program, "agent"}, append(argv, "--cgroup-root", p.node.CgroupRoot, "--bpffs", dir)...)
	}
	p.cmd = p.node.Command(context.Background(), argv...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.WaitDelay = time.Second
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// exited reports that the process has ended, with its last output.
func (p *proxy) exited() error {
	select {
	case <-p.done:
		text := strings.TrimSpace(p.log.String())
		return errors.New("it has ended: " + text[strings.LastIndexByte(text, '\n')+1:])
	default:
		return nil
	}
}

func (p *proxy) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(3*time.Second, func() { _ = p.cmd.Process.Kill() })
	<-p.done
	late.Stop()
}

// inTable finds addresses of the large Service in a listing: all are in 10.0.0.0/11,
// which has none of the lab's.
var inTable = regexp.MustCompile(`\b10\.(?:[0-9]|[12][0-9]|3[01])\.[0-9]+\.[0-9]+\b`)

// endpoints returns the endpoints of the large Service in the kernel.
func (p *proxy) endpoints(ctx context.Context) (map[string]bool, error) {
	found := map[string]bool{}
	if p.bpffs != "" {
		list, err := inspect.Endpoints(p.bpffs)
		for _, e := range list {
			if a := e.Addr().String(); inTable.MatchString(a) {
				found[a] = true
			}
		}
		return found, err
	}
	out, err := p.node.Command(ctx, append([]string{"nft", "list", "table"}, strings.Fields(p.table)...)...).Output()
	for _, a := range inTable.FindAllString(string(out), -1) {
		found[a] = true
	}
	return found, err
}

// memory is the process's resident memory now and at its largest, in MiB.
func (p *proxy) memory() (now, peak float64, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, 0, errors.Join(err, p.exited())
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		kib, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		switch name {
		case "VmRSS":
			now = kib / 1024
		case "VmHWM":
			peak = kib / 1024
		}
	}
	return now, peak, nil
}

// cpu is the time, in seconds, of the process and its ended children (proc(5): utime,
// stime, cutime, cstime in hundredths of a second).
func (p *proxy) cpu() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, errors.Join(err, p.exited())
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	total := 0.0
	for _, f := range fields[11:15] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time: %w", err)
		}
		total += n / 100
	}
	return total, nil
}
