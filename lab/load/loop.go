package load

import (
	"bytes"
	"math"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

const (
	sweepEvery = int64(10 * time.Millisecond) // how often timeouts are looked for
	restAfter  = int64(10 * time.Millisecond) // pause of a connection that failed, so that errors do not spin
	farAway    = int64(math.MaxInt64)
)

// state is the state of a slot.
type state uint8

const (
	idle       state = iota // may take the next request; its socket may be open
	resting                 // failed a moment ago
	connecting              // waits until the socket can be written
	waiting                 // waits for the response
)

// slot is one connection, or several one after the other, with one request at a time.
type slot struct {
	fd         int   // -1: none
	generation int32 // distinguishes events of this socket from those of an earlier one
	state      state
	intended   int64 // when the request should have left
	sent       int64 // when it was really begun, or its rest
	rest       int64 // how long it rests
	answers    uint8 // which of DNS's two answers are there
	resp       response
}

// loop drives some of the connections of a run on one thread. Times are
// nanoseconds since the run started.
type loop struct {
	cfg      Config
	sources  []endpoint
	buddy    *buddy // of DNS
	message  []byte
	poll     *poller
	shared   *budget
	slots    []slot
	ready    ring // idle slots, the longest idle first
	resters  int  // slots that rest
	buf      []byte
	started  time.Time
	warm     int64 // requests intended before do not count
	deadline int64
	swept    int64

	// The open loop's schedule: request number n leaves at first + n*interval.
	interval, first float64
	issued          int64

	hist     *hdrhistogram.Histogram
	errors   map[string]int64
	statuses map[int]int64 // with AnyStatus
	answered int64
	bytes    int64
	measured int64 // length of the measured time
	slow     [2]int64
	underWay int64 // of a closed loop, at its end
	slowList []SlowRequest

	seenAnswered, seenFailed atomic.Int64 // for Progress
}

func newLoop(cfg Config, index int, shared *budget) (*loop, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	n := cfg.Connections / cfg.Threads
	if index < cfg.Connections%cfg.Threads {
		n++
	}
	l := &loop{
		cfg: cfg, sources: newEndpoints(cfg), message: cfg.message(), poll: p, shared: shared,
		slots: make([]slot, n), ready: newRing(n), buf: make([]byte, 64<<10),
		warm: int64(cfg.Warmup), deadline: int64(cfg.Warmup + cfg.Duration),
		hist: newHistogram(), errors: map[string]int64{}, statuses: map[int]int64{},
	}
	if cfg.Rate > 0 {
		l.interval = 1e9 / cfg.Rate * float64(cfg.Threads)
		l.first = l.interval * float64(index) / float64(cfg.Threads)
	}
	if cfg.Kind == DNS {
		if l.buddy, err = newBuddy(cfg); err != nil {
			unix.Close(p.fd)
			return nil, err
		}
	}
	for i := range l.slots {
		l.slots[i].fd = -1
		l.ready.push(int32(i))
	}
	return l, nil
}

func (l *loop) close() {
	for i := range l.slots {
		l.drop(&l.slots[i])
	}
	l.buddy.end()
	unix.Close(l.poll.fd)
}

func (l *loop) now() int64 { return int64(time.Since(l.started)) }

// run generates load until the deadline and then waits for active requests.
func (l *loop) run(started time.Time) {
	l.started = started
	// Without this, an ordinary thread's timers are up to 50 µs late.
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	now := l.now()
	for now < l.deadline && !l.shared.stop.Load() {
		next := l.issue(now)
		l.handleEvents(min(next, now+sweepEvery, l.deadline) - now)
		now = l.now()
		l.sweep(now)
	}
	end := min(now, l.deadline)
	l.measured = max(end-l.warm, 0)
	l.drain(end)
}

// issue starts every due request and returns the time of the next one.
func (l *loop) issue(now int64) (next int64) {
	if l.cfg.Rate == 0 {
		// Only as many as are idle now: a slot that fails at once must not restart again
		// and again while others wait.
		for n := l.ready.len(); n > 0; n-- {
			l.begin(l.ready.pop(), l.now())
		}
		return farAway
	}
	// Unsent requests of a warm-up with too high a rate must not delay the measurement.
	if first := int64(math.Ceil((float64(l.warm) - l.first) / l.interval)); now >= l.warm && l.issued < first {
		l.issued = first
	}
	for l.ready.len() > 0 {
		due := l.due()
		if due > now {
			return due
		}
		l.issued++
		l.begin(l.ready.pop(), due)
	}
	return farAway // wait for an answer or a sweep
}

// due is the intended time of the next request of an open loop.
func (l *loop) due() int64 { return int64(l.first + float64(l.issued)*l.interval) }

// begin starts one request on an idle slot.
func (l *loop) begin(i int32, intended int64) {
	s := &l.slots[i]
	s.intended, s.sent = intended, l.now()
	s.resp.reset()
	if s.fd >= 0 {
		l.send(s)
		return
	}
	fd, connected, err := l.sources[int(i)%len(l.sources)].open()
	if err != nil {
		l.fail(s, err)
		return
	}
	s.fd = fd
	s.generation++
	if err := l.poll.add(fd, i, s.generation); err != nil {
		l.fail(s, err)
		return
	}
	if connected {
		l.send(s)
		return
	}
	s.state = connecting
}

// send writes the request. It is small enough for one write.
func (l *loop) send(s *slot) {
	s.state, s.answers = waiting, 0
	if l.buddy != nil {
		l.buddy.send(s.fd)
	}
	if _, err := unix.Write(s.fd, l.message); err != nil {
		l.fail(s, err)
	}
}

// handleEvents waits up to d nanoseconds for events and acts on them.
func (l *loop) handleEvents(d int64) {
	events, err := l.poll.wait(time.Duration(d))
	if err != nil {
		l.errors[errorKind(err)]++
		return
	}
	for _, ev := range events {
		i := ev.Fd
		s := &l.slots[i]
		if s.generation != ev.Pad || s.fd < 0 {
			continue // of a socket that is closed by now
		}
		if s.state == connecting {
			if ev.Events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) == 0 {
				continue
			}
			l.send(s) // a refused connection shows itself as the error of write
		}
		if s.state != waiting {
			// The server ended an idle connection. The next request opens another.
			if s.state == idle && ev.Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
				l.drop(s)
			}
			continue
		}
		if ev.Events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			l.receive(i, s, ev.Events&unix.EPOLLRDHUP != 0)
		}
	}
}

// receive reads the available part of the response. ended reports that the server has
// closed the connection after it: the slot must not send another request there.
func (l *loop) receive(i int32, s *slot, ended bool) {
	for {
		n, err := unix.Read(s.fd, l.buf)
		switch {
		case err == unix.EAGAIN:
			return
		case err == unix.EINTR:
			continue
		case err != nil:
			l.fail(s, err)
			return
		}
		l.bytes += int64(n)
		if l.cfg.Kind == DNS {
			s.answers |= dnsAnswer(l.buf[:n])
			if s.answers != dnsBoth {
				continue
			}
		}
		if l.cfg.datagrams() {
			l.finish(i, s, l.cfg.FreshPorts)
			return
		}
		if n == 0 {
			l.atEOF(i, s)
			return
		}
		if l.cfg.Kind == Memcached {
			if s.resp.head = append(s.resp.head, l.buf[:n]...); bytes.HasSuffix(s.resp.head, []byte("END\r\n")) {
				s.resp.status = 200 // as HTTP would call it
				l.finish(i, s, true)
				return
			}
			continue
		}
		done, err := s.resp.feed(l.buf[:n])
		if err != nil {
			l.fail(s, err)
			return
		}
		if done {
			l.finish(i, s, ended || s.resp.closes || l.cfg.Kind == Conn)
			return
		}
	}
}

// atEOF is called when the server closed a connection that waits for a response.
func (l *loop) atEOF(i int32, s *slot) {
	if s.resp.eof() {
		l.finish(i, s, true)
		return
	}
	l.fail(s, errClosed)
}

// drop closes a slot's socket, if it has one.
func (l *loop) drop(s *slot) {
	if s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
}
