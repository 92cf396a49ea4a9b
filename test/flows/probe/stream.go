package probe

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"
)

// maxLost bounds the losses a report names one by one.
const maxLost = 10

// patience is how long a stream waits after the timeout of a question, to distinguish
// a late answer from a lost one.
const patience = 10 * time.Second

// stream is a running sequence of numbered questions.
type stream struct {
	stop chan struct{}
	done chan struct{}

	mu     sync.Mutex
	report Report
}

// startStream asks question after question until it is stopped:
//
//	tcp      numbered lines over one connection
//	udp      numbered datagrams through one socket (connected unless asked otherwise)
//	new-tcp  a new connection for every question
//	new-udp  a new socket for every question
//
// A question that is not answered in time is lost; a connection that breaks is
// lost with everything it would have carried, so it is opened again only to
// count on. A datagram is sent once, so that a late answer to it says of a slow
// machine, not of a loss: it counts as answered, and as late. TCP sends again what
// was lost, and is given no more than its time. The first question has been answered
// when startStream returns
// it.
func (p *process) startStream(req Request) ([]Answer, error) {
	dst, err := netip.ParseAddrPort(req.Dst)
	if err != nil {
		return nil, fmt.Errorf("read destination: %w", err)
	}
	single := true
	switch req.Proto {
	case "new-tcp":
		req.Proto, single = "tcp", false
	case "new-udp":
		req.Proto, single = "udp", false
	}
	s := &stream{stop: make(chan struct{}), done: make(chan struct{}), report: Report{Servers: map[string]int{}}}
	first := make(chan Answer, 1)
	go s.run(req, dst, single, first)
	answer := <-first
	if answer.Err != OK {
		return nil, fmt.Errorf("ask the first question: %s (%s)", answer.Err, answer.Detail)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.streams[req.Name] = s
	return []Answer{answer}, nil
}

func (s *stream) run(req Request, dst netip.AddrPort, single bool, first chan<- Answer) {
	var sock *socket
	server := "" // of sock
	defer func() {
		if sock != nil {
			sock.close()
		}
		close(s.done)
	}()
	inTime := req.timeout()
	if req.Proto == "udp" {
		req.TimeoutMS = int((inTime + patience) / time.Millisecond)
	}
	for i := 0; ; i++ {
		asked := time.Now()
		answer, used := askOnce(req, dst, sock, strconv.Itoa(i))
		ended := answer.Err == Reset && sock != nil && hasEnded(req.Processes[server])
		if ended {
			sock.close()
			answer, used = askOnce(req, dst, nil, strconv.Itoa(i))
		}
		s.mu.Lock()
		if ended {
			s.report.Ended++
		}
		s.report.count(i, answer)
		s.report.measure(time.Since(asked), inTime, answer)
		s.mu.Unlock()
		sock, server = used, answer.Server
		if sock != nil && (!single || answer.Err != OK && sock.stream) {
			sock.close()
			sock = nil
		}
		if i == 0 {
			first <- answer
			if answer.Err != OK {
				return
			}
		}
		select {
		case <-s.stop:
			return
		case <-time.After(req.pause()):
		}
	}
}

func (r *Report) count(i int, a Answer) {
	r.Sent++
	if a.Err == OK {
		r.Answered++
		r.Servers[a.Server]++
		return
	}
	if len(r.Lost) < maxLost {
		r.Lost = append(r.Lost, fmt.Sprintf("question %d: %s (%s)", i, a.Err, a.Detail))
	}
}

// measure notes how long a question took.
func (r *Report) measure(took, inTime time.Duration, a Answer) {
	if a.Err != OK {
		return
	}
	if took > inTime {
		r.Late++
	}
	r.SlowestMS = max(r.SlowestMS, int(took/time.Millisecond))
}

// stopStream ends a stream and returns its report.
func (p *process) stopStream(name string) (*Report, error) {
	p.mu.Lock()
	s := p.streams[name]
	delete(p.streams, name)
	p.mu.Unlock()
	if s == nil {
		return nil, fmt.Errorf("no stream is called %q", name)
	}
	close(s.stop)
	<-s.done
	return &s.report, nil
}

// peekStream returns a copy of a stream's report up to now.
func (p *process) peekStream(name string) (*Report, error) {
	p.mu.Lock()
	s := p.streams[name]
	p.mu.Unlock()
	if s == nil {
		return nil, fmt.Errorf("no stream is called %q", name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	report := s.report
	report.Servers, report.Lost = maps.Clone(report.Servers), slices.Clone(report.Lost)
	return &report, nil
}
