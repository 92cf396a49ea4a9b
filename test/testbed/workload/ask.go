package workload

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// Question is a client's request to a server: HTTP, UDP or TCP.
type Question struct {
	Kind    string        `json:"kind"`
	To      string        `json:"to"`                // address and port
	From    string        `json:"from,omitempty"`    // address and port to bind, "" any
	Timeout time.Duration `json:"timeout,omitempty"` // 0: 2 seconds
}

// The values of Answer.Outcome.
const (
	Answered = "answered"
	Refused  = "refused" // RST or ICMP port unreachable
	Silent   = "silent"  // no answer before the timeout
	Failed   = "failed"  // anything else; see Answer.Error
)

// Answer is the result of a Question.
type Answer struct {
	Outcome string `json:"outcome"`
	Server  string `json:"server,omitempty"` // the name that the server gave
	// Client is the client's address and port as the server saw them; HTTP
	// gives no port.
	Client netip.AddrPort `json:"client,omitzero"`
	// Peer is the peer address that the client's socket reports (getpeername).
	Peer  string `json:"peer,omitempty"`
	Error string `json:"error,omitempty"`
}

// networks are the networks of the kinds of servers.
var networks = map[string]string{HTTP: "tcp", TCP: "tcp", UDP: "udp"}

// Validate returns an error for a Question that cannot be sent.
func (q Question) Validate() error {
	if networks[q.Kind] == "" {
		return fmt.Errorf("ask: kind %q is none of http, udp, tcp", q.Kind)
	}
	if _, _, err := net.SplitHostPort(q.To); err != nil {
		return fmt.Errorf("ask %q: write ADDRESS:PORT, [ADDRESS]:PORT for IPv6", q.To)
	}
	if _, err := netip.ParseAddrPort(q.From); q.From != "" && err != nil {
		return fmt.Errorf("ask from %q: write ADDRESS:PORT, [ADDRESS]:PORT for IPv6", q.From)
	}
	return nil
}

// Ask sends a request from a process of its own in the host's namespace and cgroup, so
// that cgroup socket hooks see it.
func Ask(ctx context.Context, h *topology.Host, q Question) (Answer, error) {
	cmd, err := command(ctx, h, order{Ask: &q})
	if err != nil {
		return Answer{}, err
	}
	out, err := cmd.Output()
	if err != nil {
		return Answer{}, err
	}
	var a Answer
	if err := json.Unmarshal(out, &a); err != nil {
		return Answer{}, fmt.Errorf("read answer from %s: %w: %q", h.Name, err, out)
	}
	return a, nil
}

// Put sends a request from the calling process.
func Put(ctx context.Context, q Question) Answer {
	if q.Timeout == 0 {
		q.Timeout = 2 * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, q.Timeout)
	defer cancel()
	a, err := put(ctx, q)
	switch {
	case err == nil:
		a.Outcome = Answered
		return a
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		a.Outcome = Refused
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, syscall.ETIMEDOUT):
		a.Outcome = Silent
	default:
		a.Outcome = Failed
	}
	a.Error = err.Error()
	return a
}

func put(ctx context.Context, q Question) (a Answer, err error) {
	if err := q.Validate(); err != nil {
		return a, err
	}
	network := networks[q.Kind]
	var d net.Dialer
	if q.From != "" {
		local := netip.MustParseAddrPort(q.From)
		d.LocalAddr = net.TCPAddrFromAddrPort(local)
		if network == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(local)
		}
	}
	conn, err := d.DialContext(ctx, network, q.To)
	if err != nil {
		return a, err
	}
	defer conn.Close()
	a.Peer = conn.RemoteAddr().String()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return a, err
	}
	text, err := exchange(conn, q)
	if err != nil {
		return a, err
	}
	return a.read(text)
}

// exchange sends the request for the kind of server and returns the first line of its
// answer.
func exchange(conn net.Conn, q Question) (string, error) {
	switch q.Kind {
	case UDP:
		if _, err := conn.Write([]byte("?")); err != nil {
			return "", err
		}
		buf := make([]byte, 2048)
		n, err := conn.Read(buf)
		return string(buf[:n]), err
	case HTTP:
		if _, err := fmt.Fprintf(conn, "GET /client HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", q.To); err != nil {
			return "", err
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("ask: status %s", resp.Status)
		}
		return string(body), err
	default:
		return bufio.NewReader(conn).ReadString('\n')
	}
}

// read parses "NAME CLIENT ...".
func (a Answer) read(text string) (Answer, error) {
	fields := strings.Fields(text)
	if len(fields) < 2 {
		return a, fmt.Errorf("ask: answer %q is not a name and an address", text)
	}
	a.Server = fields[0]
	var err error
	if a.Client, err = netip.ParseAddrPort(fields[1]); err == nil {
		return a, nil
	}
	addr, err := netip.ParseAddr(fields[1])
	if err != nil {
		return a, fmt.Errorf("ask: answer %q: %w", text, err)
	}
	a.Client = netip.AddrPortFrom(addr, 0)
	return a, nil
}
