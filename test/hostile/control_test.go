package hostile

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"
)

// controlScenarios have no attacker: what checks segments must not break what
// TCP allows.
var controlScenarios = []scenario{
	{name: "A large transfer with loss", together: true, run: lossy},
	{name: "A connection with nothing but keepalive probes", together: true, run: keepalive},
	{name: "A half-closed connection goes on", together: true, run: halfClosed},
	{name: "A server that does not read for a while", together: true, run: stalled},
}

// unreliable is the client whose packets are lost.
const unreliable = "client2"

// losePackets has the LAN lose 2 % of what the unreliable client sends and gets.
func (e *env) losePackets(t *testing.T) {
	t.Helper()
	const table = `table bridge lossy
delete table bridge lossy
table bridge lossy {
	chain forward {
		type filter hook forward priority 0; policy accept;
		iifname "client2" numgen random mod 50 == 0 drop
		oifname "client2" numgen random mod 50 == 0 drop
	}
}
`
	e.OnLAN(t, table, "nft", "-f", "-")
}

// What a late server does is the first line that it reads.
const (
	echoing  = "echo\n"
	stalling = "stall\n" // reads nothing for a while, then tells how much came
	trailing = "trail\n" // sends for a while after the client has closed its half
)

// silence is longer than a closed flow is kept.
const silence = 13 * time.Second

// startLateServers serves TCP on latePort of the endpoints until the test ends.
func (e *env) startLateServers(t *testing.T) {
	t.Helper()
	for _, v := range []variant{{false, "here"}, {false, "elsewhere"}} {
		pod, err := e.Host(v.endpoint())
		if err != nil {
			t.Fatal(err)
		}
		l, err := pod.Listen(t.Context(), "tcp", fmt.Sprintf("[::]:%d", latePort))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go serveLate(conn)
			}
		}()
	}
}

func serveLate(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	what, err := in.ReadString('\n')
	if err != nil {
		return
	}
	switch what {
	case echoing:
		_, _ = io.Copy(conn, in)
	case stalling:
		time.Sleep(silence)
		n, _ := io.Copy(io.Discard, in)
		_, _ = fmt.Fprintln(conn, n)
	case trailing:
		_, _ = io.Copy(io.Discard, in)
		for i := range int(silence/time.Second) + 1 {
			time.Sleep(time.Second)
			if _, err := fmt.Fprintln(conn, i); err != nil {
				return
			}
		}
	}
}

// dialLate connects to a late server.
func (e *env) dialLate(t *testing.T, from, what string, v variant) *net.TCPConn {
	t.Helper()
	host, err := e.Host(from)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	conn, err := host.Dial(ctx, "tcp", e.nodePort(t, "late-"+v.place, "tcp", v).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, what); err != nil {
		t.Fatal(err)
	}
	return conn.(*net.TCPConn)
}

// lossy: megabytes come back as they were sent, with windows that grow and
// segments that are sent again.
func lossy(t *testing.T, e *env, v variant) {
	e.losePackets(t)
	conn := e.dialLate(t, unreliable, echoing, v)
	sent, got := make([]byte, 4<<20), make([]byte, 4<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(sent)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := conn.Write(sent); err != nil {
			t.Errorf("send: %v", err)
		}
	})
	n, err := io.ReadFull(conn, got)
	wg.Wait()
	if err != nil || !bytes.Equal(sent, got) {
		t.Errorf("%d of %d bytes came back, as they were: %v, %v", n, len(sent), bytes.Equal(sent[:n], got[:n]), err)
	}
}

// keepalive: a connection carries nothing but probes, whose sequence number lies
// before the window.
func keepalive(t *testing.T, e *env, v variant) {
	conn := e.dialLate(t, honest, echoing, v)
	if err := conn.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 3}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(silence)
	if _, err := io.WriteString(conn, "again\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || line != "again\n" {
		t.Errorf("the echo is %q, %v", line, err)
	}
}

// halfClosed: the server goes on for longer than a closed flow is kept.
func halfClosed(t *testing.T, e *env, v variant) {
	conn := e.dialLate(t, honest, trailing, v)
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(conn)
	if lines := bytes.Count(text, []byte("\n")); err != nil || lines != int(silence/time.Second)+1 {
		t.Errorf("the client received %d lines, %v", lines, err)
	}
}

// stalled: the client fills the server's window and probes it.
func stalled(t *testing.T, e *env, v variant) {
	conn := e.dialLate(t, honest, stalling, v)
	const size = 16 << 20
	if _, err := conn.Write(make([]byte, size)); err != nil {
		t.Fatalf("send: %v", err)
	}
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(conn)
	if want := fmt.Sprintln(size); err != nil || string(text) != want {
		t.Errorf("the server counted %q bytes, %v, want %q", text, err, want)
	}
}
