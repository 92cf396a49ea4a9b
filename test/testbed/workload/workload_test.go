package workload_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/pin/tftp/v3"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

func TestMain(m *testing.M) {
	workload.RunIfAsked()
	os.Exit(m.Run())
}

// pair is a server and a client on another node.
func pair(t *testing.T) (server, client *topology.Host) {
	t.Helper()
	if err := topology.RequireRoot(); err != nil {
		t.Fatal(err)
	}
	spec := topology.DefaultSpec(fmt.Sprintf("w%d", os.Getpid()))
	spec.PodsPerNode = 1
	t.Cleanup(func() {
		if err := topology.Down(spec.Name); err != nil {
			t.Error(err)
		}
	})
	c, err := topology.Up(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return c.Pod(1, 0), c.Pod(0, 0)
}

func start(t *testing.T, h *topology.Host, c workload.Config) *topology.Cmd {
	t.Helper()
	cmd, err := workload.Start(t.Context(), h, c)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

func TestEveryServerNamesItselfAndItsClient(t *testing.T) {
	server, client := pair(t)
	for i, kind := range []string{workload.HTTP, workload.TCP, workload.UDP} {
		port := uint16(8000 + i)
		start(t, server, workload.Config{Kind: kind, Listen: fmt.Sprint(port)})
		for _, a := range server.Addrs() {
			to := netip.AddrPortFrom(a, port).String()
			got, err := workload.Ask(t.Context(), client, workload.Question{Kind: kind, To: to})
			if err != nil {
				t.Fatal(err)
			}
			if got.Outcome != workload.Answered || got.Server != server.Name || got.Client.Addr() != client.Addr(a) || got.Peer != to {
				t.Errorf("%s %s: got %+v", kind, to, got)
			}
		}
	}
}

func TestAskTellsRefusalFromSilence(t *testing.T) {
	server, client := pair(t)
	for _, kind := range []string{workload.TCP, workload.UDP} {
		got, err := workload.Ask(t.Context(), client, workload.Question{Kind: kind, To: netip.AddrPortFrom(server.IPv4, 9).String()})
		if err != nil {
			t.Fatal(err)
		}
		if got.Outcome != workload.Refused {
			t.Errorf("%s to a closed port: got %+v, want refused", kind, got)
		}
		// A node's default route leads to a router that forwards nothing.
		got, err = workload.Ask(t.Context(), client, workload.Question{Kind: kind, To: "192.0.2.1:9", Timeout: 200 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if got.Outcome != workload.Silent {
			t.Errorf("%s into the void: got %+v, want silent", kind, got)
		}
	}
}

func TestAskBindsItsSourcePort(t *testing.T) {
	server, client := pair(t)
	start(t, server, workload.Config{Kind: workload.UDP, Listen: ":7000"})
	from := netip.AddrPortFrom(client.IPv4, 4567)
	got, err := workload.Ask(t.Context(), client, workload.Question{
		Kind: workload.UDP, To: netip.AddrPortFrom(server.IPv4, 7000).String(), From: from.String()})
	if err != nil || got.Client != from {
		t.Errorf("got %+v, %v, want the client at %s", got, err, from)
	}
}

// Two servers that answer each other's answers would never stop: one datagram with a
// forged sender would be enough.
func TestUDPServersDoNotAnswerEachOther(t *testing.T) {
	server, client := pair(t)
	start(t, server, workload.Config{Kind: workload.UDP, Listen: ":7000"})
	to := netip.AddrPortFrom(server.IPv4, 7000)
	for _, row := range []struct {
		from uint16
		says string
		want bool
	}{
		{4567, "?", true},
		{4567, "name 1.2.3.4 is no answer", true},
		{4567, "some 1.2.3.4:80", false},
		{4567, "some 1.2.3.4:80 ?", false},
		{4567, "some [fd00::1]:80 some 1.2.3.4:80 ?", false},
		{7000, "?", true}, // it would be an answer to an answer
		{19, "?", false},
		{1023, "?", false},
		{1024, "?", true},
	} {
		var got string
		err := client.Do(func() (err error) {
			got, err = firstAnswer(&net.UDPAddr{IP: client.IPv4.AsSlice(), Port: int(row.from)}, to, row.says)
			return err
		})
		if answered := got != ""; err != nil || answered != row.want {
			t.Errorf("%q from port %d: answer %q (%v), want one: %v", row.says, row.from, got, err, row.want)
		}
	}
}

// firstAnswer sends a request from a socket at the address. The server handles datagrams
// in order, so an earlier request without an answer will never get one.
func firstAnswer(from *net.UDPAddr, to netip.AddrPort, says string) (string, error) {
	asker, err := net.DialUDP("udp", from, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return "", err
	}
	defer asker.Close()
	if _, err := asker.Write([]byte(says)); err != nil {
		return "", err
	}
	if a := workload.Put(context.Background(), workload.Question{Kind: workload.UDP, To: to.String(),
		Timeout: 5 * time.Second}); a.Outcome != workload.Answered {
		return "", fmt.Errorf("the later question: %+v", a)
	}
	buf := make([]byte, 2048)
	_ = asker.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	n, err := asker.Read(buf)
	if os.IsTimeout(err) {
		err = nil
	}
	return string(buf[:n]), err
}

func TestUDPAnswersFromTheAddressAsked(t *testing.T) {
	server, client := pair(t)
	// A second address, which routing would not pick as the source.
	if out, err := server.Command(t.Context(), "ip", "address", "add", "10.244.1.99/24", "dev", "eth0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := server.Command(t.Context(), "ip", "address", "add", "fd44:0:0:1::99/64", "nodad", "dev",
		"eth0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	start(t, server, workload.Config{Kind: workload.UDP, Listen: ":7000"})
	// Connected sockets accept an answer from no other address.
	for _, to := range []string{"10.244.1.99:7000", "[fd44:0:0:1::99]:7000"} {
		got, err := workload.Ask(t.Context(), client, workload.Question{Kind: workload.UDP, To: to, Timeout: 20 * time.Second})
		if err != nil || got.Outcome != workload.Answered {
			t.Errorf("%s: got %+v, %v", to, got, err)
		}
	}
}

func TestHTTPBodyHasTheSizeAskedFor(t *testing.T) {
	server, client := pair(t)
	start(t, server, workload.Config{Kind: workload.HTTP, Listen: ":80", Size: 4000})
	out, err := client.Command(t.Context(), "curl", "-s", "--noproxy", "*", "http://"+server.IPv4.String()+"/any/path").Output()
	if err != nil {
		t.Fatal(err)
	}
	if len(out) != 4000 || !strings.HasPrefix(string(out), server.Name+"\n") {
		t.Errorf("got %d bytes, beginning %.20q", len(out), out)
	}
}

func TestTCPStreamNumbersItsLines(t *testing.T) {
	server, client := pair(t)
	start(t, server, workload.Config{Kind: workload.TCP, Listen: ":7000", Stream: true, Interval: time.Millisecond})
	conn, err := client.Dial(t.Context(), "tcp", netip.AddrPortFrom(server.IPv6, 7000).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	for _, want := range []string{server.Name + " " + conn.LocalAddr().String(), "1", "2", "3"} {
		if line, err := r.ReadString('\n'); err != nil || line != want+"\n" {
			t.Fatalf("got %q, %v, want %q", line, err, want)
		}
	}
}

func TestTCPEchoes(t *testing.T) {
	server, client := pair(t)
	start(t, server, workload.Config{Kind: workload.TCP, Listen: ":7000"})
	conn, err := client.Dial(t.Context(), "tcp", netip.AddrPortFrom(server.IPv4, 7000).String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "over and out")
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(conn)
	if want := server.Name + " " + conn.LocalAddr().String() + "\nover and out"; err != nil || string(all) != want {
		t.Errorf("got %q, %v, want %q", all, err, want)
	}
}

// Concurrent requests get a file each, from ports in turn.
func TestBlocksServesManyAtOnce(t *testing.T) {
	server, client := pair(t)
	start(t, server, workload.Config{Kind: workload.Blocks, Listen: ":69", Size: 5120})
	conns := make([]net.PacketConn, 70) // more than one batch
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(server.Addrs()[0], 69))
	for i := range conns {
		var err error
		if conns[i], err = client.ListenPacket(t.Context(), "udp", ":0"); err != nil {
			t.Fatal(err)
		}
		defer conns[i].Close()
		if _, err := conns[i].WriteTo([]byte("\x00\x01file\x00octet\x00"), to); err != nil {
			t.Fatal(err)
		}
	}
	ports := map[string]bool{}
	for i, conn := range conns {
		got, buf := 0, make([]byte, 1000)
		for block := byte(1); ; block++ {
			_ = conn.SetReadDeadline(time.Now().Add(await.Limit))
			n, from, err := conn.ReadFrom(buf)
			if err != nil || n < 4 || buf[1] != 3 || buf[3] != block {
				t.Fatalf("transfer %d, block %d: %q, %v", i, block, buf[:n], err)
			}
			ports[from.String()] = true
			got += n - 4
			if _, err := conn.WriteTo([]byte{0, 4, 0, block}, from); err != nil {
				t.Fatal(err)
			}
			if n < 516 {
				break
			}
		}
		if got != 5120 {
			t.Errorf("transfer %d: %d bytes", i, got)
		}
	}
	if len(ports) < 2 || ports[to.String()] {
		t.Errorf("%d files came from the ports %v", len(conns), ports)
	}
}

func TestTFTPServesAnyName(t *testing.T) {
	server, client := pair(t)
	start(t, server, workload.Config{Kind: workload.TFTP, Listen: ":69", Size: 3000})
	// The client opens its socket when a transfer starts, so all of it runs in the
	// client's namespace.
	for _, a := range server.Addrs() {
		var got bytes.Buffer
		err := client.Do(func() error {
			c, err := tftp.NewClient(netip.AddrPortFrom(a, 69).String())
			if err != nil {
				return err
			}
			w, err := c.Receive("any/name", "octet")
			if err != nil {
				return err
			}
			_, err = w.WriteTo(&got)
			return err
		})
		if err != nil || got.Len() != 3000 || !strings.HasPrefix(got.String(), server.Name+"\n") {
			t.Errorf("%s: got %d bytes, %v", a, got.Len(), err)
		}
	}
}

func TestServersEndWithTheirContext(t *testing.T) {
	server, _ := pair(t)
	for i, kind := range []string{workload.HTTP, workload.TCP, workload.UDP, workload.TFTP} {
		ctx, cancel := context.WithCancel(t.Context())
		cmd, err := workload.Start(ctx, server, workload.Config{Kind: kind, Listen: fmt.Sprint(8000 + i)})
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		_ = cmd.Wait()
		if cmd.ProcessState.ExitCode() != 0 {
			t.Errorf("%s: ended with %s, want exit code 0", kind, cmd.ProcessState)
		}
	}
	if left, err := server.Processes(); err != nil || len(left) > 0 {
		t.Errorf("processes left: %v, %v", left, err)
	}
}

func TestStartSaysWhyItFails(t *testing.T) {
	server, _ := pair(t)
	start(t, server, workload.Config{Kind: workload.TCP, Listen: "7000"})
	start(t, server, workload.Config{Kind: workload.UDP, Listen: "7000"})
	for kind, want := range map[string]string{
		workload.HTTP: "address already in use",
		workload.TCP:  "address already in use",
		workload.UDP:  "address already in use",
		workload.TFTP: "address already in use",
		"gopher":      `"gopher" is none of`,
	} {
		_, err := workload.Start(t.Context(), server, workload.Config{Kind: kind, Listen: "7000"})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", kind, err, want)
		}
	}
}

func TestValidateConfig(t *testing.T) {
	for want, c := range map[string]workload.Config{
		"kind":     {Listen: ":80", Name: "x"},
		"address":  {Kind: workload.TCP, Listen: "localhost:80", Name: "x"},
		"name":     {Kind: workload.TCP, Listen: ":80"},
		"one word": {Kind: workload.HTTP, Listen: ":80", Name: `a"; }`},
		"negative": {Kind: workload.HTTP, Listen: ":80", Name: "x", Size: -1},
	} {
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got %v, want an error with %q", c, err, want)
		}
	}
}
