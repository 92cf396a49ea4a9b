package soak

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// place is where honest clients run, as the losses name it.
type place struct {
	name string
	host *topology.Host
	node string // that it is or runs on, "" for a host outside
	proc *process
}

// process is a running client process.
type process struct {
	place string
	cmd   *topology.Cmd
	in    io.WriteCloser
	done  chan struct{}

	mu     sync.Mutex
	counts counts
	onces  map[string]chan event
}

// startClient starts a client process on a host. It calls report for each loss and for
// each socket that opens or closes.
func startClient(p place, report func(place, event)) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	cmd := p.host.Command(context.Background(), self)
	cmd.Env = append(cmd.Env, clientVariable+"=1", "GOMAXPROCS=1", "GOGC=200")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the soak alone
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &process{place: p.name, cmd: cmd, in: in, done: make(chan struct{}), onces: map[string]chan event{}}
	go func() {
		defer close(c.done)
		c.read(p, out, report)
		_ = cmd.Wait() // the soak ends it
	}()
	return c, nil
}

func (c *process) read(p place, out io.Reader, report func(place, event)) {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			return
		}
		switch e.Op {
		case "counts":
			c.mu.Lock()
			c.counts = *e.Counts
			c.mu.Unlock()
		case "once", "stopped":
			c.mu.Lock()
			answer := c.onces[e.Flow]
			delete(c.onces, e.Flow)
			c.mu.Unlock()
			if answer != nil {
				answer <- e
			}
		default:
			report(p, e)
		}
	}
}

func (c *process) order(o order) error {
	line, err := json.Marshal(o)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.in.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("order client at %s: %w", c.place, err)
	}
	return nil
}

// await sends an order and waits for the event that answers it.
func (c *process) await(ctx context.Context, name string, o order) (event, error) {
	answer := make(chan event, 1)
	c.mu.Lock()
	c.onces[name] = answer
	c.mu.Unlock()
	if err := c.order(o); err != nil {
		return event{}, err
	}
	select {
	case e := <-answer:
		return e, nil
	case <-c.done:
		return event{}, fmt.Errorf("client at %s ended", c.place)
	case <-ctx.Done():
		return event{}, ctx.Err()
	}
}

func (c *process) totals() counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts
}

// end ends the process.
func (c *process) end() {
	_ = c.in.Close()
	select {
	case <-c.done:
	case <-time.After(2 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.done
	}
}
