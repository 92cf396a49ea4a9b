package files

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
)

// bouncePort is on the hosts that commands name.
const bouncePort = 5001

// TestFTPNamesNobodyElse has client and server name addresses by hand. What is the
// speaker's own is expected; what is another host's goes through as it was said, and
// nothing is opened or translated for it (bounce attack, CERT CA-1997-27).
func TestFTPNamesNobodyElse(t *testing.T) {
	r := start(t, "files-bounce")
	s := r.load(t, service("ftp", corev1.ProtocolTCP, 21, "a0"))
	server := r.ftpByHand(t, "a0")
	client, pod, victim := r.Addr("client0", false), r.Addr("a0", false), r.Addr("client1", false)
	for _, node := range []string{"a", "b"} {
		t.Run("at "+node, func(t *testing.T) {
			conn, their := r.control(t, server, s.at(t, flows.NodePort(node), flows.TCP4))
			say := func(from, to net.Conn, text string) string {
				t.Helper()
				if _, err := io.WriteString(from, text+"\r\n"); err != nil {
					t.Fatal(err)
				}
				_ = to.SetReadDeadline(time.Now().Add(2 * time.Second))
				line, err := bufio.NewReader(to).ReadString('\n')
				if err != nil {
					t.Fatalf("%q does not come: %v", text, err)
				}
				return strings.TrimSpace(line)
			}
			port := func(a netip.Addr, port int) string {
				return fmt.Sprintf("%s,%d,%d", strings.ReplaceAll(a.String(), ".", ","), port>>8, port&255)
			}
			// Somebody else first: an expectation that is there hides another.
			for _, said := range []struct {
				from, to net.Conn
				text     string
			}{
				{conn, their, "PORT " + port(victim, bouncePort)},
				{conn, their, "EPRT |1|" + victim.String() + "|5001|"},
				{their, conn, "227 Entering Passive Mode (" + port(victim, bouncePort) + ")"},
			} {
				if got := say(said.from, said.to, said.text); got != said.text {
					t.Errorf("%q arrives as %q", said.text, got)
				}
				if e := r.expectations(t, node); e != "" {
					t.Errorf("%q is expected: %s", said.text, e)
				}
			}
			// The speaker's own: so much for what this test can see.
			say(conn, their, "PORT "+port(client, bouncePort))
			if e := r.expectations(t, node); !strings.Contains(e, fmt.Sprintf("dport=%d", bouncePort)) {
				t.Errorf("a client names itself, and is not expected: %q", e)
			}
			text := "227 Entering Passive Mode (" + port(pod, bouncePort+1) + ")"
			if got := say(their, conn, text); got == text || !strings.HasPrefix(got, "227 ") {
				t.Errorf("a server names itself: %q arrives as %q, not translated", text, got)
			}
		})
	}
}

// expectations are those of a node, as text.
func (r *rig) expectations(t *testing.T, node string) string {
	t.Helper()
	out, err := r.client(t.Context(), node, "conntrack", "-L", "expect")
	if err != nil {
		t.Fatal(err, out)
	}
	var lines []string
	for line := range strings.Lines(out) {
		if strings.Contains(line, "proto=6") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "; ")
}

// ftpByHand listens as an FTP server would, and says nothing.
func (r *rig) ftpByHand(t *testing.T, on string) net.Listener {
	t.Helper()
	h, err := r.Host(on)
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Listen(t.Context(), "tcp", ":21")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// control opens a control connection from a client outside: its end and the server's.
func (r *rig) control(t *testing.T, server net.Listener, at netip.AddrPort) (conn, their net.Conn) {
	t.Helper()
	h, err := r.Host("client0")
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		var err error
		their, err = server.Accept()
		accepted <- err
	}()
	if conn, err = h.Dial(t.Context(), "tcp", at.String()); err != nil {
		t.Fatal(err)
	}
	select {
	case err = <-accepted:
	case <-time.After(5 * time.Second):
		err = errors.New("the server accepts nobody")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); their.Close() })
	return conn, their
}
