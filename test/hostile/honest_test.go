package hostile

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// patience is how long a new honest client, or an answer, may take.
const patience = 5 * time.Second

// honestMark begins each line that an honest client sends.
const honestMark = "honest-"

// connection is an honest client's TCP connection. Every answer is compared with
// the only bytes that its server may send.
type connection struct {
	net.Conn
	name   string
	server string // the server that must answer
	source string // the client's address as the server sees it
	answer *bufio.Reader
}

// connect opens a connection through a Service and asks once, within patience.
func (e *env) connect(from string, v variant, dst netip.AddrPort) (*connection, error) {
	host, err := e.Host(from)
	if err != nil {
		return nil, err
	}
	return dial(host, v.endpoint(), dst)
}

func dial(host *topology.Host, server string, dst netip.AddrPort) (*connection, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := host.Dial(ctx, "tcp", dst.String())
	if err != nil {
		return nil, fmt.Errorf("a new honest client cannot connect: %w", err)
	}
	c := &connection{Conn: conn, server: server, answer: bufio.NewReader(conn)}
	c.name = fmt.Sprintf("connection from %s to %s", conn.LocalAddr(), dst)
	if err := c.ask(); err != nil {
		conn.Close()
		return nil, err
	}
	return c, nil
}

// mustConnect is connect; it ends the connection with the test.
func (e *env) mustConnect(t *testing.T, v variant, dst netip.AddrPort) *connection {
	t.Helper()
	c, err := e.connect(honest, v, dst)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a line and fails unless exactly its echo comes back in time.
func (c *connection) ask() error {
	return c.askText(fmt.Sprintf(honestMark+"%016x%s", rand.Uint64(), strings.Repeat("x", rand.IntN(200))))
}

func (c *connection) askText(text string) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	if _, err := c.Write([]byte(text + "\n")); err != nil {
		return fmt.Errorf("%s broke: %w", c.name, err)
	}
	line, err := c.answer.ReadString('\n')
	if err != nil {
		return fmt.Errorf("%s broke: %w", c.name, err)
	}
	if c.source == "" {
		var first struct{ Source string }
		_ = json.Unmarshal([]byte(line), &first)
		c.source = first.Source
	}
	want := fmt.Sprintf("{\"server\":%q,\"source\":%q,\"echo\":%q}\n", c.server, c.source, text)
	if line != want {
		return fmt.Errorf("%s received foreign bytes: %q, want %q", c.name, line, want)
	}
	return nil
}

// local is the client's end.
func (c *connection) local() netip.AddrPort { return netip.MustParseAddrPort(c.LocalAddr().String()) }

// remote is the Service's address.
func (c *connection) remote() netip.AddrPort { return netip.MustParseAddrPort(c.RemoteAddr().String()) }

// seenAs is the client's end as the server sees it.
func (c *connection) seenAs() netip.AddrPort {
	at, err := netip.ParseAddrPort(c.source)
	if err != nil {
		return netip.AddrPort{}
	}
	return at
}

// crowd is an honest connection, and new honest clients one after the other,
// beside an attack.
type crowd struct {
	stop chan struct{}
	wg   sync.WaitGroup
	mu   sync.Mutex
	err  error
}

// beside starts a crowd that goes through the variant's Service until the test
// ends, and fails the test if one of the invariants does not hold.
func (e *env) beside(t *testing.T, v variant) *crowd {
	t.Helper()
	dst := e.nodePort(t, v.place, "tcp", v)
	c := &crowd{stop: make(chan struct{})}
	first := e.mustConnect(t, v, dst)
	c.repeat(50*time.Millisecond, first.ask)
	c.repeat(500*time.Millisecond, func() error { return e.probe(v, dst) })
	t.Cleanup(func() {
		c.end()
		if err := c.failed(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// end ends the crowd and waits until it has.
func (c *crowd) end() {
	close(c.stop)
	c.wg.Wait()
}

// failed returns which invariants did not hold.
func (c *crowd) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// probe is a new honest client: it connects, asks twice and closes.
func (e *env) probe(v variant, dst netip.AddrPort) error {
	c, err := e.connect(honest, v, dst)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.ask()
}

// repeat calls a function until the crowd ends, or until it fails.
func (c *crowd) repeat(pause time.Duration, fn func() error) {
	c.wg.Go(func() {
		for {
			select {
			case <-c.stop:
				return
			case <-time.After(pause):
			}
			if err := fn(); err != nil {
				c.mu.Lock()
				c.err = errors.Join(c.err, err)
				c.mu.Unlock()
				return
			}
		}
	})
}
