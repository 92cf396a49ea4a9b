package probe

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"

	"spillway.dev/spillway/internal/diagnosis/connectivity/echo"
)

// Arg is the first argument that turns a test binary into a probe.
const Arg = "spillway-probe"

// Main turns the process into a probe when it was started as one, and does not
// return then. Every TestMain that starts probes calls it first.
func Main() {
	if len(os.Args) < 2 || os.Args[1] != Arg {
		return
	}
	p := &process{
		out:     json.NewEncoder(os.Stdout),
		sockets: map[string]*socket{},
		streams: map[string]*stream{},
	}
	if err := p.run(); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// process is the state of a running probe.
type process struct {
	mu      sync.Mutex
	out     *json.Encoder
	sockets map[string]*socket // kept across requests
	streams map[string]*stream
}

// run serves requests, each in its own goroutine, until stdin ends.
func (p *process) run() error {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var req Request
		if err := json.Unmarshal(lines.Bytes(), &req); err != nil {
			return fmt.Errorf("read request: %w", err)
		}
		go p.answer(req)
	}
	return lines.Err()
}

func (p *process) answer(req Request) {
	resp := Response{ID: req.ID}
	if err := p.do(req, &resp); err != nil {
		resp.Err = err.Error()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.out.Encode(resp); err != nil {
		os.Exit(1) // the test is gone
	}
}

func (p *process) do(req Request, resp *Response) (err error) {
	switch req.Op {
	case Try, "":
		resp.Answers, err = p.try(req)
	case Serve:
		err = echo.Serve(req.Server, req.Listen...)
	case Stream:
		resp.Answers, err = p.startStream(req)
	case Stop:
		resp.Report, err = p.stopStream(req.Name)
	case Peek:
		resp.Report, err = p.peekStream(req.Name)
	case Forget:
		if s := p.kept(req.Socket); s != nil {
			s.close()
			p.keep(req.Socket, nil)
		}
	default:
		err = fmt.Errorf("unknown operation %q", req.Op)
	}
	return err
}

func (p *process) kept(name string) *socket {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sockets[name]
}

func (p *process) keep(name string, s *socket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sockets[name] = s
}
