package probe

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Command is what Start needs of an *exec.Cmd, or of one that starts elsewhere.
type Command interface {
	StdinPipe() (io.WriteCloser, error)
	StdoutPipe() (io.ReadCloser, error)
	Start() error
	Wait() error
}

// Process is a running probe as the test sees it. Its methods may be called by
// many goroutines at once.
type Process struct {
	name string
	cmd  Command
	in   io.WriteCloser

	mu      sync.Mutex
	nextID  int
	waiting map[int]chan Response
	ended   error
}

// Start starts a probe. The command must run the test binary with Arg as its
// first argument, in the namespace and cgroup the probe is to speak from; name
// appears in errors.
func Start(name string, cmd Command) (*Process, error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start probe %s: %w", name, err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start probe %s: %w", name, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start probe %s: %w", name, err)
	}
	p := &Process{name: name, cmd: cmd, in: in, waiting: map[int]chan Response{}}
	go p.read(out)
	return p, nil
}

// Close ends the probe, which ends with its stdin, and waits for it.
func (p *Process) Close() error {
	_ = p.in.Close()
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("end probe %s: %w", p.name, err)
	}
	return nil
}

// read passes every response to the call that waits for it.
func (p *Process) read(out io.Reader) {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var resp Response
		if err := json.Unmarshal(lines.Bytes(), &resp); err != nil {
			p.fail(fmt.Errorf("read response %q: %w", lines.Text(), err))
			return
		}
		p.mu.Lock()
		ch := p.waiting[resp.ID]
		delete(p.waiting, resp.ID)
		p.mu.Unlock()
		if ch != nil {
			ch <- resp
		}
	}
	p.fail(errors.Join(errors.New("probe ended"), lines.Err()))
}

// fail ends all current and later calls with an error.
func (p *Process) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = fmt.Errorf("probe %s: %w", p.name, err)
	for id, ch := range p.waiting {
		delete(p.waiting, id)
		ch <- Response{ID: id, Err: p.ended.Error()}
	}
}

// Do sends one request and waits for its response.
func (p *Process) Do(ctx context.Context, req Request) (Response, error) {
	ch, err := p.post(req)
	if err != nil {
		return Response{}, err
	}
	select {
	case resp := <-ch:
		if resp.Err != "" {
			return resp, fmt.Errorf("probe %s: %s", p.name, resp.Err)
		}
		return resp, nil
	case <-ctx.Done():
		return Response{}, fmt.Errorf("probe %s: wait for answer: %w", p.name, ctx.Err())
	}
}

func (p *Process) post(req Request) (<-chan Response, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		return nil, p.ended
	}
	p.nextID++
	req.ID = p.nextID
	line, err := json.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("probe %s: write request: %w", p.name, err)
	}
	ch := make(chan Response, 1)
	p.waiting[req.ID] = ch
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		delete(p.waiting, req.ID)
		return nil, fmt.Errorf("probe %s: write request: %w", p.name, err)
	}
	return ch, nil
}
