package probe

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/diagnosis/connectivity/echo"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

// start starts a probe in this process's own namespace and cgroup.
func start(t *testing.T) *Process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := Start(t.Name(), exec.Command(self, Arg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("end probe: %v", err)
		}
	})
	return p
}

func do(t *testing.T, p *Process, req Request) Response {
	t.Helper()
	resp, err := p.Do(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// reply is the answer to a question.
func reply(t *testing.T, question []byte) []byte {
	text, err := json.Marshal(echo.Reply{Server: "a0", Source: "x", Echo: strings.TrimSpace(string(question))})
	if err != nil {
		t.Error(err)
	}
	return append(text, '\n')
}

// freePort returns a loopback port that nothing listens on.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "[::]:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// The test has a network namespace of its own: on the machine, other programs may have a fresh port.
func TestServerNamesItselfAndItsClient(t *testing.T) {
	netnstest.Enter(t)
	lo, err := netlink.LinkByName("lo")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetUp(lo))
	p, port := start(t), freePort(t)
	do(t, p, Request{Op: Serve, Server: "a0", Listen: []string{
		fmt.Sprintf("tcp [::]:%d", port), fmt.Sprintf("udp [::]:%d", port)}})
	for _, proto := range []string{"tcp", "udp"} {
		for _, host := range []string{"127.0.0.1", "::1"} {
			for _, req := range []Request{
				{},
				{SameSocket: true},
				{Socket: "kept"},
				{Unconnected: true},
				{Mapped: true},
				{LowPorts: true},
				{FreshPorts: true},
				{FreshPorts: true, LowPorts: true},
			} {
				if req.Unconnected && proto == "tcp" || req.Mapped && host == "::1" {
					continue
				}
				req.Op, req.Proto, req.Tries = Try, proto, 3
				req.Dst = net.JoinHostPort(host, fmt.Sprint(port))
				if req.Socket != "" {
					req.Socket += proto + host
				}
				checkAnswers(t, req, do(t, p, req).Answers)
			}
		}
	}
}

func checkAnswers(t *testing.T, req Request, answers []Answer) {
	t.Helper()
	if len(answers) != 3 {
		t.Fatalf("%+v: %d answers, want 3", req, len(answers))
	}
	host, _, _ := net.SplitHostPort(req.Dst)
	sources := map[string]bool{}
	for _, a := range answers {
		if a.Err != OK || a.Server != "a0" {
			t.Errorf("%+v: answer %+v, want one of a0", req, a)
		}
		if !req.Unconnected && a.Peer != req.Dst || req.Unconnected && a.From != req.Dst {
			t.Errorf("%+v: peer %q from %q, want %s", req, a.Peer, a.From, req.Dst)
		}
		if source, _, _ := net.SplitHostPort(a.Source); source != host {
			t.Errorf("%+v: source %s, want %s", req, a.Source, host)
		}
		sources[a.Source] = true
		if _, port, _ := net.SplitHostPort(a.Source); req.LowPorts != (port < "45000") {
			t.Errorf("%+v: source port %s is on the wrong side of 45000", req, port)
		} else if n, _ := strconv.Atoi(port); req.FreshPorts && n%8 == 6 {
			t.Errorf("%+v: a node may give source port %s to another connection of the client", req, port)
		}
	}
	if one := req.SameSocket || req.Socket != ""; one != (len(sources) == 1) {
		t.Errorf("%+v: sources %v, one socket: %v", req, sources, one)
	}
}

func TestFailuresAreSorted(t *testing.T) {
	p, port := start(t), freePort(t)
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for _, test := range []struct {
		proto, dst string
		want       Kind
	}{
		{"tcp", fmt.Sprintf("127.0.0.1:%d", port), Refused},
		{"udp", fmt.Sprintf("[::1]:%d", port), Refused},
		{"udp", silent.LocalAddr().String(), Timeout},
	} {
		a := do(t, p, Request{Proto: test.proto, Dst: test.dst, TimeoutMS: 200}).Answers[0]
		if a.Err != test.want {
			t.Errorf("%s to %s: %q (%s), want %q", test.proto, test.dst, a.Err, a.Detail, test.want)
		}
	}
}

func TestStreamCountsWhatIsLost(t *testing.T) {
	p, port := start(t), freePort(t)
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	go func() { // answers three lines, then hangs up
		conn, err := l.Accept()
		if err != nil {
			return
		}
		_ = l.Close()
		buf := make([]byte, 100)
		for range 3 {
			n, _ := conn.Read(buf)
			_, _ = conn.Write(reply(t, buf[:n]))
		}
		_ = conn.Close()
	}()
	dst := fmt.Sprintf("127.0.0.1:%d", port)
	do(t, p, Request{Op: Stream, Proto: "tcp", Dst: dst, Name: "s", PauseMS: 1})
	for range 100 { // until the stream has surely met the hang-up
		if a := do(t, p, Request{Proto: "tcp", Dst: dst}).Answers[0]; a.Err == Refused {
			break
		}
	}
	report := do(t, p, Request{Op: Stop, Name: "s"}).Report
	if report.Answered > 3 || report.Servers["a0"] != report.Answered {
		t.Errorf("report %+v, want at most 3 answers of a0", report)
	}
	if _, err := p.Do(context.Background(), Request{Op: Stop, Name: "s"}); err == nil {
		t.Error("a stream was stopped twice")
	}
	if _, err := p.Do(context.Background(), Request{Op: Stream, Proto: "tcp", Dst: dst, Name: "t"}); err == nil {
		t.Error("a stream started although its first question failed")
	}
}

// netexec closes its connections when it ends.
func TestAConnectionEndsWithItsServerOnly(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	server := exec.Command("sleep", "600")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer server.Process.Kill()
	third := make(chan struct{})
	go func() { // answers one question of each connection, and ends before it closes the second
		buf := make([]byte, 200)
		for i := range 3 {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(buf)
			_, _ = conn.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na0"))
			switch i {
			case 1:
				_ = server.Process.Kill()
				_ = server.Wait()
			case 2:
				close(third)
				_, _ = io.Copy(io.Discard, conn) // until the probe ends it
			}
			_ = conn.Close()
		}
	}()
	p := start(t)
	first := do(t, p, Request{Op: Stream, Proto: "tcp", Dst: l.Addr().String(), Name: "s", PauseMS: 1, TimeoutMS: 200, Netexec: true,
		Processes: map[string]int{"a0": server.Process.Pid}})
	if len(first.Answers) != 1 || first.Answers[0].Server != "a0" {
		t.Errorf("first answer %+v, want one of a0", first.Answers)
	}
	<-third
	r := do(t, p, Request{Op: Stop, Name: "s"}).Report
	if r.Ended != 1 || len(r.Lost) == 0 || !strings.Contains(r.Lost[0], "question 1: reset") {
		t.Errorf("report %+v, want the second question lost, and one connection that ended with its server", r)
	}
}

// A datagram is not sent again: that its answer came at last says that none was lost.
func TestLateAnswersToDatagramsAreNotLost(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { // answers the second question late, and ends before the third
		defer close(ended)
		defer server.Close()
		buf := make([]byte, 100)
		for i := range 2 {
			n, client, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			time.Sleep(time.Duration(i) * 300 * time.Millisecond)
			_, _ = server.WriteTo(reply(t, buf[:n]), client)
		}
	}()
	p := start(t)
	do(t, p, Request{Op: Stream, Proto: "udp", Dst: server.LocalAddr().String(), Name: "s", TimeoutMS: 200, PauseMS: 100})
	<-ended
	await.True(t, "the third question", func() bool { return do(t, p, Request{Op: Peek, Name: "s"}).Report.Sent > 2 })
	r := do(t, p, Request{Op: Stop, Name: "s"}).Report
	if r.Answered != 2 || r.Late != 1 || r.SlowestMS < 300 {
		t.Errorf("report %+v, want 2 answers, 1 of them late", r)
	}
	if len(r.Lost) == 0 || !strings.Contains(r.Lost[0], "refused") || !strings.Contains(r.Lost[0], "from 127.0.0.1:") {
		t.Errorf("lost: %v, want the question that nobody was there for, and where it came from", r.Lost)
	}
}
