package soak

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pin/tftp/v3"
	"golang.org/x/sys/unix"
)

// The kinds of honest traffic.
const (
	stream    = "stream"     // one TCP connection for many questions
	connect   = "connect"    // a TCP connection for one question
	freshUDP  = "udp"        // a UDP socket for one question
	keptUDP   = "udp-kept"   // a connected UDP socket for many questions
	sendtoUDP = "udp-sendto" // an unconnected UDP socket for many questions
	files     = "tftp"       // a file of 5 KiB over TFTP
)

// flow is one sequence of questions, each asked when the one before is answered.
type flow struct {
	Name string `json:"name"`
	Kind string `json:"kind"`
	To   string `json:"to"` // address and port
	// Pause is the mean time between two questions, Life that of a socket that is kept.
	Pause time.Duration `json:"pause"`
	Life  time.Duration `json:"life,omitempty"`
	// Patience is the time for an answer. A handshake has as much.
	Patience time.Duration `json:"patience"`
}

// order is one line to a client.
type order struct {
	Start *flow  `json:"start,omitempty"`
	Stop  string `json:"stop,omitempty"` // the name of a flow
	Once  *flow  `json:"once,omitempty"` // one question, answered by an event
}

// event is one line from a client.
type event struct {
	// Op is "open" or "close" of a socket that is kept, "lost", "once", "stopped" or "counts".
	Op     string         `json:"op"`
	Flow   string         `json:"flow,omitempty"`
	Local  netip.AddrPort `json:"local,omitzero"`
	Remote netip.AddrPort `json:"remote,omitzero"`
	Server string         `json:"server,omitempty"` // the server that answers, or answered last
	Seen   netip.AddrPort `json:"seen,omitzero"`    // Local as the server sees it
	Began  time.Time      `json:"began,omitzero"`   // when the question was sent
	Ended  time.Time      `json:"ended,omitzero"`
	Error  string         `json:"error,omitempty"`
	// Again tells of a lost datagram that the next one of the same socket was answered.
	Again bool `json:"again,omitempty"`
	// Counts of all flows since the start.
	Counts *counts `json:"counts,omitempty"`
}

// counts are totals of a client.
type counts struct {
	Connections int64 `json:"connections"` // TCP connections, UDP sockets and TFTP transfers
	Questions   int64 `json:"questions"`   // answered
}

func (c *counts) add(o counts) {
	c.Connections += o.Connections
	c.Questions += o.Questions
}

// clientVariable makes an executable with RunIfAsked a client.
const clientVariable = "SPILLWAY_LAB_SOAK"

// RunIfAsked runs a client and exits if a soak started the process, else it returns at
// once. Call it at the start of main and of TestMain.
func RunIfAsked() {
	if os.Getenv(clientVariable) == "" {
		return
	}
	c := &client{out: json.NewEncoder(os.Stdout), stops: map[string]context.CancelFunc{}}
	if err := c.run(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "soak client:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// client asks questions in a process of its own, in the namespace and cgroup of a host.
type client struct {
	mu     sync.Mutex
	out    *json.Encoder
	counts counts
	stops  map[string]context.CancelFunc
}

// run follows orders until in ends.
func (c *client) run(in io.Reader) error {
	go func() {
		for range time.Tick(time.Second) {
			c.mu.Lock()
			now := c.counts
			c.mu.Unlock()
			c.send(event{Op: "counts", Counts: &now})
		}
	}()
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("read order: %w", err)
		}
		switch {
		case o.Start != nil:
			ctx, stop := context.WithCancel(context.Background())
			c.mu.Lock()
			c.stops[o.Start.Name] = stop
			c.mu.Unlock()
			go c.follow(ctx, *o.Start)
		case o.Once != nil:
			go c.once(*o.Once)
		default:
			c.mu.Lock()
			if stop := c.stops[o.Stop]; stop != nil {
				stop()
			}
			delete(c.stops, o.Stop)
			c.mu.Unlock()
		}
	}
	return lines.Err()
}

func (c *client) send(e event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out.Encode(e) != nil {
		os.Exit(0) // the soak has ended
	}
}

func (c *client) count(connections, questions int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts.add(counts{connections, questions})
}

// around returns a duration between half and one and a half of d.
func around(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return d/2 + rand.N(d)
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// follow asks the questions of a flow until ctx ends. A question under way is still
// answered, or lost.
func (c *client) follow(ctx context.Context, f flow) {
	defer c.send(event{Op: "stopped", Flow: f.Name})
	pause(ctx, rand.N(f.Pause+1)) // flows that start at once would ask at once
	for ctx.Err() == nil {
		c.socket(ctx, f)
	}
}

// socket asks the questions of one socket.
func (c *client) socket(ctx context.Context, f flow) {
	e := event{Flow: f.Name, Began: time.Now()}
	if f.Kind == files {
		err := fetch(f)
		c.conclude(e, err)
		pause(ctx, around(f.Pause))
		return
	}
	s, err := open(f)
	if err != nil {
		c.conclude(e, err)
		pause(ctx, around(f.Pause))
		return
	}
	defer s.Close()
	end := e.Began.Add(around(f.Life))
	for asked := 0; ; asked++ {
		e.Began = time.Now()
		err := s.ask(f.Patience)
		e.Local, e.Remote, e.Server, e.Seen = s.local(), s.to, s.server, s.seen
		if err != nil {
			lost := time.Now()
			if isDatagram(f.Kind) {
				e.Again = s.ask(againWithin) == nil
			}
			c.lose(e, err, lost)
			if f.Kind != stream && f.Life > 0 {
				c.send(event{Op: "close", Flow: f.Name})
			}
			break
		}
		if asked == 0 {
			c.count(1, 0)
		}
		c.count(0, 1)
		if asked == 0 && f.Life > 0 {
			opened := e
			opened.Op = "open"
			c.send(opened)
		}
		pause(ctx, around(f.Pause))
		if ctx.Err() != nil || f.Life == 0 || time.Now().After(end) {
			break
		}
	}
	if f.Life > 0 {
		c.send(event{Op: "close", Flow: f.Name})
	}
}

// conclude counts a socket of one question, or reports its loss.
func (c *client) conclude(e event, err error) {
	if err == nil {
		c.count(1, 1)
		return
	}
	c.lose(e, err, time.Now())
}

// againWithin is the time for the answer to the datagram after a lost one.
const againWithin = 3 * time.Second

// lose reports a question that was lost at a time.
func (c *client) lose(e event, err error, at time.Time) {
	e.Op, e.Ended, e.Error = "lost", at, err.Error()
	c.send(e)
}

// once asks one question and reports the answer or its absence.
func (c *client) once(f flow) {
	e := event{Op: "once", Flow: f.Name, Began: time.Now()}
	s, err := open(f)
	if err == nil {
		err = s.ask(f.Patience)
		e.Local, e.Remote, e.Server = s.local(), s.to, s.server
		s.Close()
	}
	if err != nil {
		e.Error = err.Error()
	}
	e.Ended = time.Now()
	c.send(e)
}

// socket is an open socket of a flow.
type socket struct {
	net.Conn                // nil for sendtoUDP
	packets  net.PacketConn // of sendtoUDP
	to       netip.AddrPort
	answers  *bufio.Reader // of TCP
	asked    int
	tag      string // makes the questions of this socket unlike those of others
	server   string
	seen     netip.AddrPort
}

// open connects, for TCP within the flow's patience.
func open(f flow) (*socket, error) {
	to, err := netip.ParseAddrPort(f.To)
	if err != nil {
		return nil, err
	}
	s := &socket{to: to, tag: strconv.FormatUint(rand.Uint64(), 36)}
	switch f.Kind {
	case stream, connect:
		d := net.Dialer{Timeout: f.Patience}
		if s.Conn, err = d.Dial("tcp", f.To); err != nil {
			return nil, err
		}
		s.answers = bufio.NewReader(s.Conn)
		return s, s.greeted(f.Patience)
	case sendtoUDP:
		network := "udp4"
		if to.Addr().Is6() {
			network = "udp6"
		}
		lc := net.ListenConfig{Control: enlarge}
		s.packets, err = lc.ListenPacket(context.Background(), network, ":0")
	default:
		d := net.Dialer{Control: enlarge}
		s.Conn, err = d.Dial("udp", f.To)
	}
	return s, err
}

// receiveBuffer has room for the answers to all datagrams that an attacker sends in the name
// of a socket. Without room for the honest answer, the kernel would drop it.
const receiveBuffer = 8 << 20

// enlarge gives a socket its receive buffer.
func enlarge(_, _ string, raw syscall.RawConn) (err error) {
	ctl := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	})
	return errors.Join(ctl, err)
}

// Close closes the socket.
func (s *socket) Close() error {
	if s.packets != nil {
		return s.packets.Close()
	}
	return s.Conn.Close()
}

func (s *socket) local() netip.AddrPort {
	var a net.Addr
	if s.packets != nil {
		a = s.packets.LocalAddr()
	} else {
		a = s.Conn.LocalAddr()
	}
	at, _ := netip.ParseAddrPort(a.String())
	return at
}

// greeted reads the line with which the TCP server begins: its name and the client's address.
func (s *socket) greeted(patience time.Duration) error {
	_ = s.SetDeadline(time.Now().Add(patience)) // of an open socket
	line, err := s.answers.ReadString('\n')
	if err != nil {
		s.Conn.Close()
		return fmt.Errorf("greeting: %w", err)
	}
	s.identify(strings.Fields(line))
	return nil
}

// identify takes over the server's name and the client's address from an answer.
func (s *socket) identify(words []string) {
	if len(words) >= 2 {
		s.server = words[0]
		s.seen, _ = netip.ParseAddrPort(words[1])
	}
}

// errBytes reports an answer that the server did not give.
var errBytes = errors.New("foreign bytes")

// ask asks one question and waits for its answer.
func (s *socket) ask(patience time.Duration) error {
	s.asked++
	question := fmt.Sprintf("honest-%s-%d", s.tag, s.asked)
	deadline := time.Now().Add(patience)
	if s.answers == nil {
		return s.askDatagram(question, deadline)
	}
	_ = s.SetDeadline(deadline) // of an open socket
	if _, err := s.Write([]byte(question + "\n")); err != nil {
		return err
	}
	line, err := s.answers.ReadString('\n')
	if err != nil {
		return err
	}
	if line != question+"\n" {
		return fmt.Errorf("%w: %q to %q", errBytes, line, question)
	}
	return nil
}

// askDatagram ignores datagrams that answer another question: late ones, and forged ones.
func (s *socket) askDatagram(question string, deadline time.Time) error {
	var err error
	if s.packets != nil {
		_ = s.packets.SetDeadline(deadline)
		_, err = s.packets.WriteTo([]byte(question), net.UDPAddrFromAddrPort(s.to))
	} else {
		_ = s.SetDeadline(deadline)
		_, err = s.Write([]byte(question))
	}
	if err != nil {
		return err
	}
	buf := make([]byte, 2048)
	for {
		n, from := 0, net.Addr(nil)
		if s.packets != nil {
			n, from, err = s.packets.ReadFrom(buf)
		} else {
			n, err = s.Read(buf)
		}
		if err != nil {
			return err
		}
		if !bytes.HasSuffix(buf[:n], []byte(" "+question)) {
			continue
		}
		if at := addrPort(from); from != nil && at != s.to {
			return fmt.Errorf("%w: answer from %s, asked %s", errBytes, at, s.to)
		}
		s.identify(strings.Fields(string(buf[:n])))
		return nil
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	if a == nil {
		return netip.AddrPort{}
	}
	at, _ := netip.ParseAddrPort(a.String())
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}

// fetch reads a file. The client repeats lost blocks, and its request.
func fetch(f flow) error {
	c, err := tftp.NewClient(f.To)
	if err != nil {
		return err
	}
	c.SetTimeout(f.Patience / 5)
	c.SetRetries(4)
	from, err := c.Receive("file", "octet")
	if err != nil {
		return err
	}
	var got bytes.Buffer
	if _, err := from.WriteTo(&got); err != nil {
		return err
	}
	if got.Len() != tftpSize {
		return fmt.Errorf("%w: %d of %d", errBytes, got.Len(), tftpSize)
	}
	return nil
}

const tftpSize = 5120
