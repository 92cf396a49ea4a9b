package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/test/testbed/topology"
)

// process is an agent that runs until Down.
type process struct {
	name string
	cmd  *topology.Cmd
	log  tail
	done chan struct{}
}

// start starts a program on a host, with more in its environment. What it prints is kept for error messages.
func start(host *topology.Host, name string, argv []string, env ...string) (*process, error) {
	// Not bound to a context: the harness's Down ends it, in the right order.
	p := &process{
		name: name,
		cmd:  host.Command(context.Background(), argv...),
		done: make(chan struct{}),
	}
	if len(env) > 0 {
		p.cmd.Env = append(p.cmd.Environ(), env...)
	}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	// Children that hold the output open must not keep Wait waiting.
	p.cmd.WaitDelay = time.Second
	// A process group of its own: Ctrl-C on the terminal must reach only this
	// program, which then ends the others in order.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait() // the log says more than the exit code
		close(p.done)
	}()
	return p, nil
}

// exited tells whether the process has ended, and with what last words.
func (p *process) exited() error {
	select {
	case <-p.done:
		words := p.log.lastLine()
		if words == "" {
			words = p.cmd.ProcessState.String()
		}
		return fmt.Errorf("%s ended: %s", p.name, words)
	default:
		return nil
	}
}

// cpu is the time, in seconds, that the process and its children that ended have
// used (proc(5): utime, stime, cutime, cstime in hundredths of a second).
func (p *process) cpu() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, fmt.Errorf("read CPU time of %s: %w", p.name, err)
	}
	// The name, in parentheses, may hold blanks.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	total := 0.0
	for _, f := range fields[11:15] {
		n, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time of %s: %w", p.name, err)
		}
		total += n / 100
	}
	return total, nil
}

// AgentsCPU is the time, in seconds, that all agents and kube-proxies have used,
// programs that they ran included.
func (h *Harness) AgentsCPU() (total float64, err error) {
	for _, p := range h.agents {
		one, err := p.cpu()
		if err != nil {
			return 0, err
		}
		total += one
	}
	return total, nil
}

// signal asks the process to end.
func (p *process) signal() { _ = p.cmd.Process.Signal(syscall.SIGTERM) }

// wait gives the process some time to end, then kills it.
func (p *process) wait(patience time.Duration) {
	select {
	case <-p.done:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// until repeats a check until it passes, the process ends or time is over.
func (p *process) until(ctx context.Context, what string, limit time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if gone := p.exited(); gone != nil {
			return gone
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			if words := p.log.lastLine(); words != "" {
				err = fmt.Errorf("%w; its last line: %s", err, words)
			}
			return fmt.Errorf("%s: %s after %v: %w", p.name, what, limit, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// tail keeps the last few kilobytes that were written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 8 << 10

// Write implements io.Writer.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if extra := len(t.buf) - tailSize; extra > 0 {
		t.buf = append(t.buf[:0], t.buf[extra:]...)
	}
	return len(b), nil
}

// lastLine returns the last line that is not empty.
func (t *tail) lastLine() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := bytes.TrimSpace(t.buf)
	return string(bytes.TrimSpace(text[bytes.LastIndexByte(text, '\n')+1:]))
}

// lastLines returns the last n lines.
func (t *tail) lastLines(n int) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(t.buf)), "\n")
	return strings.Join(lines[max(len(lines)-n, 0):], "\n")
}

// Begin returns the machine of an experiment, or an error if it cannot run there. Callers
// call it before they build anything or report progress.
func Begin() (experiment.Machine, error) {
	if err := CanRun(); err != nil {
		return experiment.Machine{}, err
	}
	return experiment.ReadMachine()
}

// CanRun returns an error if an experiment cannot run on this machine.
func CanRun() error {
	if err := topology.RequireRoot(); err != nil {
		return err
	}
	if spillway != "" {
		if _, err := Spillway(); err != nil {
			return err
		}
	}
	return NeedPrograms(Packages)
}

// NeedPrograms returns an error that names the programs that are missing and
// the Debian packages that hold them.
func NeedPrograms(packages map[string]string) error {
	var missing, install []string
	for program, pkg := range packages {
		if _, err := exec.LookPath(program); err != nil {
			missing, install = append(missing, program), append(install, pkg)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	slices.Sort(install)
	return fmt.Errorf("find programs: no %s in PATH: run \"apt-get install %s\", as root with /usr/sbin in PATH",
		strings.Join(missing, ", "), strings.Join(install, " "))
}
