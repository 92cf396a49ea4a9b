package limitlistener

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
)

// farListener accepts connections from any address, in memory.
type farListener struct {
	accepted chan net.Conn
	closed   chan struct{}
	once     sync.Once
}

func (l *farListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *farListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *farListener) Addr() net.Addr { return &net.TCPAddr{} }

// farConn is the server's end of a connection.
type farConn struct {
	net.Conn
	local, remote net.Addr
}

func (c farConn) LocalAddr() net.Addr  { return c.local }
func (c farConn) RemoteAddr() net.Addr { return c.remote }

// server serves with limits. Requests to /wait last until the test ends.
type server struct {
	t       *testing.T
	far     *farListener
	limiter *Limiter
	own     netip.Addr
}

func newServer(t *testing.T, own string, limits Limits) *server {
	t.Helper()
	s := &server{t, &farListener{accepted: make(chan net.Conn), closed: make(chan struct{})}, New(limits), netip.MustParseAddr(own)}
	end := make(chan struct{})
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			<-end
		}
	})
	srv := &http.Server{Handler: h, ConnState: s.limiter.State, ReadHeaderTimeout: time.Hour}
	go func() { _ = srv.Serve(s.limiter.Listener(s.far)) }()
	t.Cleanup(func() {
		close(end)
		srv.Close()
	})
	return s
}

// client is the client's end of a connection.
type client struct {
	net.Conn
	r *bufio.Reader
}

func (s *server) dial(from netip.Addr) *client {
	s.t.Helper()
	near, far := net.Pipe()
	s.t.Cleanup(func() { near.Close() })
	addr := func(a netip.Addr) net.Addr { return net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 4000)) }
	s.far.accepted <- farConn{far, addr(s.own), addr(from)}
	return &client{near, bufio.NewReader(near)}
}

// send sends a request, or its beginning.
func (c *client) send(text string) error {
	if err := c.SetDeadline(time.Now().Add(await.Limit)); err != nil {
		return err
	}
	_, err := io.WriteString(c, text)
	return err
}

// ask sends a request and reads its answer.
func (c *client) ask() error {
	if err := c.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// open returns the number of connections that are open, and of those, that have a request.
func (s *server) open() (all, serving int) {
	s.limiter.mu.Lock()
	defer s.limiter.mu.Unlock()
	for _, c := range s.limiter.open {
		if c.serves {
			serving++
		}
	}
	return len(s.limiter.open), serving
}

// nth returns the address after first by n steps; of an IPv6 address, by networks of 64 bits.
func nth(first string, n int) netip.Addr {
	a := netip.MustParseAddr(first)
	if a.Is4In6() {
		return netip.AddrFrom16(nth(a.Unmap().String(), n).As16())
	}
	b := a.AsSlice()
	last := len(b) - 1
	if a.Is6() {
		last = 7
	}
	for i := last; n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	next, _ := netip.AddrFromSlice(b)
	return next
}

// A flood of connections neither keeps other clients out nor stays open.
func TestFloods(t *testing.T) {
	limits := Limits{Remote: 20, PerAddress: 5, Local: 4}
	for _, family := range []struct{ own, honest, attacker string }{
		{"192.0.2.1", "198.51.100.7", "203.0.113.0"},
		{"2001:db8::1", "2001:db8:1::7", "2001:db8:2::"},
		{"::ffff:192.0.2.1", "::ffff:198.51.100.7", "::ffff:203.0.113.0"}, // a socket for both families
	} {
		own, honest := netip.MustParseAddr(family.own), netip.MustParseAddr(family.honest)
		sources := map[string]func(i int) netip.Addr{
			"one address":   func(int) netip.Addr { return netip.MustParseAddr(family.attacker) },
			"any addresses": func(i int) netip.Addr { return nth(family.attacker, i) },
		}
		for name, source := range sources {
			for what, text := range map[string]string{
				"nothing":              "",
				"a part of a header":   "GET / HTTP/1.1\r\nHost:",
				"a request, slowly":    "GET /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
				"one request of three": "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
			} {
				t.Run(fmt.Sprintf("%s: %s send %s", own, name, what), func(t *testing.T) {
					s := newServer(t, family.own, limits)
					probe, balancer := s.dial(own), s.dial(honest)
					if err := errors.Join(probe.ask(), balancer.ask()); err != nil {
						t.Fatal(err)
					}
					for i := range 200 {
						c := s.dial(source(i))
						if text != "" {
							_ = c.send(text) // it may be replaced before
						}
					}
					// Clients that were there stay, unless many addresses replace those that wait.
					if err := probe.ask(); err != nil {
						t.Errorf("a probe of the node with a connection: %v", err)
					}
					if err := balancer.ask(); name == "one address" && err != nil {
						t.Errorf("a client with a connection: %v", err)
					}
					// New ones always get their answer.
					for _, from := range []netip.Addr{own, netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback(), honest} {
						if err := s.dial(from).ask(); err != nil {
							t.Errorf("a new client %s: %v", from, err)
						}
					}
					most := limits.Local + limits.Remote
					if name == "one address" {
						most = limits.Local + limits.PerAddress + 2 // and two of the balancer
					}
					if got, _ := s.open(); got > most {
						t.Errorf("%d connections are open, want at most %d", got, most)
					}
				})
			}
		}
	}
}

// A network of 64 bits is one client: a host chooses the rest of its address.
func TestANetworkIsOneClient(t *testing.T) {
	s := newServer(t, "2001:db8::1", Limits{Remote: 20, PerAddress: 5, Local: 4})
	for i := range 50 {
		s.dial(netip.MustParseAddr(fmt.Sprintf("2001:db8:2::%x", i+1)))
	}
	await.True(t, "five connections stay", func() bool { n, _ := s.open(); return n == 5 })
}

// A client has the time in which as many others connect as may be open, also if all that are
// open have requests.
func TestAClientHasTimeToAsk(t *testing.T) {
	limits := Limits{Remote: 20, PerAddress: 5, Local: 4}
	for _, attacker := range []string{"203.0.113.0", "2001:db8:2::"} {
		s := newServer(t, "192.0.2.1", limits)
		attack := func(from, n int) {
			for i := range n {
				_ = s.dial(nth(attacker, from+i)).send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
			}
		}
		attack(0, 3*limits.Remote)
		honest := s.dial(netip.MustParseAddr("198.51.100.7"))
		attack(100, limits.Remote-1)
		if err := honest.ask(); err != nil {
			t.Errorf("attackers from %s: %v", attacker, err)
		}
	}
}

// With KeepRequests, a connection that waits is closed before one that has a request, and of
// those that wait, the oldest.
func TestWhichIsClosed(t *testing.T) {
	s := newServer(t, "192.0.2.1", Limits{Remote: 3, PerAddress: 3, Local: 1, KeepRequests: true})
	serving := s.dial(nth("203.0.113.0", 1))
	if err := serving.send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the request is served", func() bool { _, n := s.open(); return n == 1 })
	first, second := s.dial(nth("203.0.113.0", 2)), s.dial(nth("203.0.113.0", 3))
	if err := errors.Join(second.ask(), first.ask()); err != nil { // use makes none younger
		t.Fatal(err)
	}
	await.True(t, "both wait", func() bool { _, n := s.open(); return n == 1 })
	if err := s.dial(nth("203.0.113.0", 4)).ask(); err != nil || first.ask() == nil || second.ask() != nil {
		t.Errorf("not the oldest of those that wait was closed: %v", err)
	}
	for i := range 5 {
		if err := s.dial(nth("203.0.113.0", 5)).ask(); err != nil {
			t.Errorf("request %d: %v", i, err)
		}
	}
	var sources []string
	s.limiter.mu.Lock()
	for _, c := range s.limiter.open {
		sources = append(sources, strings.TrimSuffix(c.source.net.String(), "/32"))
	}
	s.limiter.mu.Unlock()
	if slices.Sort(sources); sources[0] != "203.0.113.1" {
		t.Errorf("the connection with a request was closed: open are %v", sources)
	}
}

// A Unix socket's clients are local; what is closed no longer counts.
func TestClosedConnectionsDoNotCount(t *testing.T) {
	l := New(Limits{Local: 2})
	for range 5 {
		near, far := net.Pipe()
		inner := &farListener{accepted: make(chan net.Conn, 1), closed: make(chan struct{})}
		inner.accepted <- far
		c, err := l.Listener(inner).Accept()
		if err != nil {
			t.Fatal(err)
		}
		near.Close()
		c.Close()
	}
	if len(l.open) != 0 {
		t.Errorf("%d connections count", len(l.open))
	}
}
