package connectivity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/diagnosis/connectivity/echo"
	"spillway.dev/spillway/test/await"
)

// short makes a client give up soon: ten times what an answer takes on a busy machine.
func short(t *testing.T) {
	t.Helper()
	before := [4]time.Duration{tryTimeout, settleTimeout, patientTimeout, settlePause}
	tryTimeout, settleTimeout, patientTimeout, settlePause = 3*time.Second, 0, 0, time.Millisecond
	t.Cleanup(func() {
		tryTimeout, settleTimeout, patientTimeout, settlePause = before[0], before[1], before[2], before[3]
	})
}

// serve starts a server with a name on one port for both protocols.
func serve(t *testing.T, name, host string) netip.AddrPort {
	t.Helper()
	for range 20 { // the port may be taken for UDP
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().String()
		l.Close()
		if echo.Serve(name, "udp "+addr, "tcp "+addr) == nil {
			return netip.MustParseAddrPort(addr)
		}
	}
	t.Fatal("no port is free")
	return netip.AddrPort{}
}

// silent returns an address that receives and does not answer.
func silent(t *testing.T) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

func closed(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String())
}

func TestAClientComparesWithTheExpectation(t *testing.T) {
	short(t)
	server4, server6, quiet, refusing := serve(t, "s", "127.0.0.1"), serve(t, "s", "::1"), silent(t), closed(t)
	one := []string{"s"}
	for _, row := range []struct {
		name string
		ask  Ask
		want string // the difference; a prefix
	}{
		{"an answer over TCP", Ask{Proto: "tcp", To: server4, Expect: Answer, Servers: one}, ""},
		{"an answer over IPv6", Ask{Proto: "udp", To: server6, Expect: Answer, Servers: one}, ""},
		{"of all servers", Ask{Proto: "tcp", To: server4, Expect: Spread, Servers: one}, ""},
		{"of one server", Ask{Proto: "udp", To: server4, Expect: Sticky, Servers: one}, ""},
		{"an unconnected socket", Ask{Proto: "udp", To: server4, Expect: Answer, Servers: one, Unconnected: true}, ""},
		{"an unconnected socket, IPv6", Ask{Proto: "udp", To: server6, Expect: Answer, Servers: one, Unconnected: true}, ""},
		{"a full packet", Ask{Proto: "udp", To: server4, Expect: Answer, Servers: one, Size: 1472}, ""},
		{"fragments", Ask{Proto: "udp", To: server6, Expect: Answer, Servers: one, Size: fragmentedSize}, ""},
		{"a refusal over TCP", Ask{Proto: "tcp", To: refusing, Expect: Refused}, ""},
		{"a refusal over UDP", Ask{Proto: "udp", To: refusing, Expect: Refused}, ""},
		{"silence", Ask{Proto: "udp", To: quiet, Expect: Dropped}, ""},
		{"another server", Ask{Proto: "tcp", To: server4, Expect: Answer, Servers: []string{"other"}}, "answer of s"},
		{"a missing server", Ask{Proto: "tcp", To: server4, Expect: Spread, Servers: []string{"s", "other"}}, "no answer of other in 120 tries"},
		{"silence instead of an answer", Ask{Proto: "udp", To: quiet, Expect: Answer, Servers: one}, "no answer"},
		{"silence instead of a refusal", Ask{Proto: "udp", To: quiet, Expect: Refused}, "no answer"},
		{"an answer instead of silence", Ask{Proto: "udp", To: server4, Expect: Dropped}, "answer of s"},
		{"an answer instead of a refusal", Ask{Proto: "tcp", To: server4, Expect: Refused}, "answer of s"},
		{"a refusal instead of silence", Ask{Proto: "tcp", To: refusing, Expect: Dropped}, "refused"},
		{"a refusal instead of an answer", Ask{Proto: "tcp", To: refusing, Expect: Answer, Servers: one}, "refused"},
	} {
		await.NoError(t, func() error { // a flood of another test may cost a datagram, also on loopback
			if got := row.ask.run(t.Context(), time.Now()); got != row.want {
				return fmt.Errorf("%s: %q, want %q", row.name, got, row.want)
			}
			return nil
		})
	}
}

// balance forwards connections to the addresses in turn.
func balance(t *testing.T, to ...netip.AddrPort) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for i := 0; ; i++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if dst := to[i%len(to)]; dst.IsValid() {
				go func() {
					defer conn.Close()
					other, err := net.Dial("tcp", dst.String())
					if err != nil {
						return
					}
					defer other.Close()
					buf := make([]byte, 1024)
					n, _ := conn.Read(buf)
					_, _ = other.Write(buf[:n])
					n, _ = other.Read(buf)
					_, _ = conn.Write(buf[:n])
				}()
			} else {
				conn.Close()
			}
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}

// A fault that concerns some connections only must not pass.
func TestASeriesFindsWhatOneTryMisses(t *testing.T) {
	short(t)
	a, b := serve(t, "a", "127.0.0.1"), serve(t, "b", "127.0.0.1")
	both := []string{"a", "b"}
	if got := (Ask{Proto: "tcp", To: balance(t, a, b), Expect: Spread, Servers: both}).run(t.Context(), time.Now()); got != "" {
		t.Errorf("two servers: %q", got)
	}
	if got := (Ask{Proto: "tcp", To: balance(t, a, b), Expect: Sticky, Servers: both}).run(t.Context(),
		time.Now()); got != "answers of a and b" {
		t.Errorf("affinity: %q", got)
	}
	if got := (Ask{Proto: "tcp", To: balance(t, a, b, netip.AddrPort{}), Expect: Spread, Servers: both}).run(t.Context(),
		time.Now()); !strings.HasSuffix(got, ", after 2 correct") {
		t.Errorf("one endpoint of three is dead: %q", got)
	}
}

func TestAClientWaitsForANewService(t *testing.T) {
	short(t)
	settleTimeout = time.Minute
	addr := closed(t)
	go func() {
		time.Sleep(50 * time.Millisecond)
		_ = echo.Serve("s", "tcp "+addr.String())
	}()
	if got := (Ask{Proto: "tcp", To: addr, Expect: Answer, Servers: []string{"s"}}).run(t.Context(), time.Now()); got != "" {
		t.Error(got)
	}
}

func TestAClientWritesAResultForEachQuestion(t *testing.T) {
	short(t)
	server := serve(t, "s", "127.0.0.1")
	var plan Plan
	for i := range 20 {
		plan.Asks = append(plan.Asks, Ask{Proto: "tcp", To: server, Expect: Answer, Servers: []string{fmt.Sprint("s", strings.Repeat("x", i%2))}})
	}
	var decoded Plan
	if err := json.Unmarshal([]byte(encode(plan)), &decoded); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	if err := RunClient(t.Context(), decoded, &log); err != nil {
		t.Fatal(err)
	}
	results := parseResults(append(log.Bytes(), `{"ask":`...))
	for i := range plan.Asks {
		if got, ok := results[i]; !ok || got != [2]string{"", "answer of s"}[i%2] {
			t.Errorf("question %d: %q, %v", i, got, ok)
		}
	}
}

func TestAFullPacketFillsThePacket(t *testing.T) {
	for size, want := range map[int]int{0: len("hello\n"), 1472: 1472, fragmentedSize: fragmentedSize} {
		text, sent := Ask{Size: size}.question(nil)
		reply, err := json.Marshal(echo.Reply{Server: "host-client-9", Source: "[2001:db8:1111:2222:3333:4444:5555:6666]:65535", Echo: text})
		if err != nil {
			t.Fatal(err)
		}
		if len(sent) != want || size > 0 && len(reply)+1 > size {
			t.Errorf("%d: %d bytes sent, want %d; the answer has %d", size, len(sent), want, len(reply))
		}
	}
	devices, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if got := payloadOf(&net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); got != devices.MTU-28 {
		t.Errorf("lo: %d", got)
	}
}
