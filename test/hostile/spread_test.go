package hostile

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"
)

// spread: which endpoint a client gets does not follow from its address and port
// and the public source. Two agents that start from nothing, one after the other,
// choose differently.
func (e *env) spread(t *testing.T) {
	t.Run("The choice of an endpoint after a fresh start", func(t *testing.T) {
		var before []string
		for _, v := range variants[:2] {
			before = append(before, e.choices(t, v))
		}
		agent := e.Agent(receiver)
		if err := agent.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := agent.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := agent.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := agent.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := e.file.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, v := range variants[:2] {
			if after := e.choices(t, v); after == before[i] {
				t.Errorf("%s: both agents chose %s", v, after)
			}
		}
	})
}

// choices tells which endpoint of two each of a series of source ports gets.
func (e *env) choices(t *testing.T, v variant) string {
	t.Helper()
	host, err := e.Host(honest)
	if err != nil {
		t.Fatal(err)
	}
	dst, choices := e.nodePort(t, "two", "tcp", v), ""
	for port := 21000; port < 21032; port++ {
		var server string
		err := host.Do(func() (err error) {
			server, err = answering(port, dst)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		choices += server[1:]
	}
	return choices
}

// answering sends one request from a port and returns the name of the server.
func answering(port int, dst netip.AddrPort) (string, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{Port: port}, Timeout: patience}
	conn, err := d.Dial("tcp", dst.String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetLinger(0) // the port is free again at once
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintln(conn, "who"); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return "", err
	}
	var reply struct{ Server string }
	if err := json.Unmarshal([]byte(line), &reply); err != nil {
		return "", fmt.Errorf("read answer %q: %w", line, err)
	}
	return reply.Server, nil
}
