package probe

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/diagnosis/connectivity/echo"
)

const defaultTimeout = 3 * time.Second

func (r Request) timeout() time.Duration {
	if r.TimeoutMS == 0 {
		return defaultTimeout
	}
	return time.Duration(r.TimeoutMS) * time.Millisecond
}

func (r Request) pause() time.Duration { return time.Duration(r.PauseMS) * time.Millisecond }

// try carries out a Try request.
func (p *process) try(req Request) ([]Answer, error) {
	if req.Proto == "http" {
		return tryHTTP(req), nil
	}
	dst, err := netip.ParseAddrPort(req.Dst)
	if err != nil {
		return nil, fmt.Errorf("read destination: %w", err)
	}
	var answers []Answer
	var shared *socket
	if req.Socket != "" {
		shared = p.kept(req.Socket)
	}
	for i := range max(req.Tries, 1) {
		if i > 0 {
			time.Sleep(req.pause())
		}
		answer, used := askOnce(req, dst, shared, strconv.Itoa(i))
		answers = append(answers, answer)
		switch {
		case used == nil:
		case req.Socket != "":
			shared = used
			p.keep(req.Socket, used)
		case req.SameSocket:
			shared = used
		default:
			used.close()
		}
	}
	if req.SameSocket && req.Socket == "" && shared != nil {
		shared.close()
	}
	return answers, nil
}

// askOnce asks one question over s, or over a new socket when s is nil. The
// socket it used comes back for more; nil when there is none to go on with.
func askOnce(req Request, dst netip.AddrPort, s *socket, text string) (Answer, *socket) {
	asked := time.Now()
	deadline := asked.Add(req.timeout())
	if s == nil {
		var err error
		if s, err = openSocket(req, dst); err != nil {
			return failed(err), nil
		}
		if !req.Unconnected {
			if err := s.connect(dst, deadline); err != nil {
				a := failed(s.traced(err, asked))
				s.close()
				return a, nil
			}
		}
	}
	var dropped uint64
	if !s.stream {
		dropped = backlogDrops()
	}
	answer, err := s.ask(req, dst, text, deadline)
	repeats := 0
	for ; repeats < lossRepeats && !s.stream && kindOf(err) == Timeout; repeats++ {
		drops := backlogDrops()
		if drops == dropped {
			break
		}
		dropped = drops
		answer, err = s.ask(req, dst, text, time.Now().Add(req.timeout()))
	}
	if err != nil {
		err = fmt.Errorf("%w; repeated %d times because CPU backlogs dropped packets", s.traced(err, asked), repeats)
		answer.Err, answer.Detail = kindOf(err), err.Error()
	}
	return answer, s
}

// lossRepeats bounds how often a datagram is repeated that a CPU's backlog may have dropped.
const lossRepeats = 3

// softnetStat is opened once: a stream asks a hundred times a second.
var softnetStat = sync.OnceValue(func() *os.File {
	f, _ := os.Open("/proc/net/softnet_stat") // nil: it cannot be read
	return f
})

// backlogDrops returns how many packets the CPUs have dropped because their backlog was full
// (net.core.netdev_max_backlog). All network namespaces share these queues: a flood of
// another test can cost this one a datagram. 0 if it cannot be read.
func backlogDrops() uint64 {
	f := softnetStat()
	if f == nil {
		return 0
	}
	data, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	if err != nil {
		return 0
	}
	var sum uint64
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 1 {
			n, _ := strconv.ParseUint(fields[1], 16, 64)
			sum += n
		}
	}
	return sum
}

func failed(err error) Answer { return Answer{Err: kindOf(err), Detail: err.Error()} }

// traced says with an error by what a trace of packets shows the question.
func (s *socket) traced(err error, asked time.Time) error {
	return fmt.Errorf("%w; from %s at %s", err, s.local(), asked.Format("15:04:05.000000"))
}

// ask sends text, in the request's size if it is shorter, and waits for the answer to
// exactly that text.
func (s *socket) ask(req Request, dst netip.AddrPort, text string, deadline time.Time) (Answer, error) {
	if req.Netexec {
		return s.askNetexec(dst, deadline)
	}
	var a Answer
	if s.connected {
		a.Peer = addrText(s.peer())
	}
	blanks := strings.Repeat(" ", max(0, req.Size-len(text)-1))
	if err := s.send([]byte(text+blanks+"\n"), dst); err != nil {
		return a, err
	}
	for {
		line, from, err := s.line(deadline)
		if err != nil {
			return a, err
		}
		var r echo.Reply
		if err := json.Unmarshal(line, &r); err != nil {
			return a, fmt.Errorf("read answer %q: %w", line, err)
		}
		if r.Echo != text {
			continue // a late answer to an earlier question
		}
		a.Server, a.Source = r.Server, r.Source
		if !s.stream {
			a.From = addrText(from)
		}
		return a, nil
	}
}

func addrText(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// line reads one line of a stream, or one datagram.
func (s *socket) line(deadline time.Time) ([]byte, netip.AddrPort, error) {
	for {
		if line, rest, ok := bytes.Cut(s.pending, []byte("\n")); ok {
			s.pending = rest
			return line, netip.AddrPort{}, nil
		}
		if !s.stream {
			data, from, err := s.receive(deadline)
			return bytes.TrimSpace(data), from, err
		}
		if err := s.more(deadline); err != nil {
			return nil, netip.AddrPort{}, err
		}
	}
}

// more waits for more bytes of a stream.
func (s *socket) more(deadline time.Time) error {
	data, _, err := s.receive(deadline)
	if err == nil && len(data) == 0 {
		err = fmt.Errorf("receive: end of stream: %w", unix.ECONNRESET)
	}
	s.pending = append(s.pending, data...)
	return err
}

// tryHTTP asks for a URL; the answer's Server is the status code.
func tryHTTP(req Request) []Answer {
	client := &http.Client{
		Timeout:   req.timeout(),
		Transport: &http.Transport{DisableKeepAlives: true},
	}
	var answers []Answer
	for range max(req.Tries, 1) {
		resp, err := client.Get("http://" + req.Dst + "/")
		if err != nil {
			answers = append(answers, failed(err))
			continue
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		answers = append(answers, Answer{Server: strconv.Itoa(resp.StatusCode)})
	}
	return answers
}
