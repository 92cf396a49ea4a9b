package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/lab/topology"
)

// process is one program of the control plane.
type process struct {
	name string
	log  string // output since this start
	cmd  *exec.Cmd
	done chan struct{}
}

// start starts a program, on a host of the lab if there is one. The kernel
// kills it when the thread that started it ends (PR_SET_PDEATHSIG), so that
// thread waits with it.
func start(host *topology.Host, logFile string, argv []string) (*process, error) {
	out, err := os.Create(logFile)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	p := &process{name: argv[0][strings.LastIndexByte(argv[0], '/')+1:], log: logFile, done: make(chan struct{})}
	run := func(cmd *exec.Cmd) {
		p.cmd = cmd
		cmd.Stdout, cmd.Stderr = out, out
		// A group of its own: Ctrl-C on a terminal is for the process that started it,
		// which then ends its programs in order.
		if cmd.Env == nil {
			cmd.Env = os.Environ()
		}
		// On a small machine the API server spends a third of its time on garbage
		// collection while it creates thousands of objects.
		cmd.Env = append(cmd.Env, "GOGC=400")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	}
	var begin func() error
	if host == nil {
		cmd := exec.Command(argv[0], argv[1:]...)
		run(cmd)
		begin = cmd.Start
	} else {
		cmd := host.Command(context.Background(), argv...)
		run(cmd.Cmd)
		begin = cmd.Start
	}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		defer close(p.done)
		defer out.Close()
		err := begin()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // the log has more details than the exit code
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	return p, nil
}

// stop sends SIGTERM, and kills the process after a timeout.
func (p *process) stop(patience time.Duration) {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(patience):
		p.kill()
	}
}

// kill ends the process at once.
func (p *process) kill() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	<-p.done
}

// errEnded reports that a process ended instead of serving.
var errEnded = errors.New("ended")

// until repeats a check until it passes, the process ends or the context does.
func (p *process) until(ctx context.Context, check func(context.Context) error) error {
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s %w: %s", p.name, errEnded, p.lastLine())
		case <-ctx.Done():
			return fmt.Errorf("%s does not serve: %w; see %s", p.name, err, p.log)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// lastLine is the last line that the process printed.
func (p *process) lastLine() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}
