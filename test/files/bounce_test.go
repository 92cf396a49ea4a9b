package files

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/suite"
)

// bouncePort is on the hosts that commands name.
const bouncePort = 5001

// TestFTPByHand speaks FTP as no server and client should.
func TestFTPByHand(t *testing.T) {
	r := start(t, "files-bounce")
	s := r.Load(t, service("ftp", corev1.ProtocolTCP, 21, "a0"), service("web", corev1.ProtocolTCP, 8000, "b1"),
		service("other", corev1.ProtocolTCP, 21, "a1"), passivePorts("own", "b0"),
		service("host", corev1.ProtocolTCP, 21, "a"))
	server := r.ftpByHand(t, "a0")
	t.Run("AnnouncesNoOtherHost", func(t *testing.T) { r.announcesNoOtherHost(t, s, server) })
	t.Run("TakesNoForeignPort", func(t *testing.T) { r.takesNoForeignPort(t, s, server) })
	if r.Mode != "iptables" { // which has no match for control connections: docs/explanation/protocols.md
		t.Run("IsBlockedIfItAnnouncesTakenPorts", func(t *testing.T) { r.blocksFTP(t, s, server) })
	}
	t.Run("MayAnnouncePortsOfItsService", func(t *testing.T) { r.announcesItsOwn(t, s) })
	t.Run("MayBeTheNodesOwn", func(t *testing.T) { r.opensOnTheNode(t, s) })
}

// announcesNoOtherHost has client and server name addresses by hand. What is the
// speaker's own is expected; what is another host's goes through as it was said, and
// nothing is opened or translated for it (bounce attack, CERT CA-1997-27).
func (h *files) announcesNoOtherHost(t *testing.T, s *suite.File, server net.Listener) {
	client, pod, victim := h.Addr("client0", false), h.Addr("a0", false), h.Addr("client1", false)
	for _, node := range []string{"a", "b"} {
		t.Run("at "+node, func(t *testing.T) {
			conn, their := h.control(t, server, "client0", address(t, s, flows.NodePort(node).Of("ftp"), flows.TCP4))
			// The other host first: an existing expectation hides another.
			for _, said := range []struct {
				from, to net.Conn
				text     string
			}{
				{conn, their, "PORT " + ftpPort(victim, bouncePort)},
				{conn, their, "EPRT |1|" + victim.String() + "|5001|"},
				{their, conn, "227 Entering Passive Mode (" + ftpPort(victim, bouncePort) + ")"},
			} {
				if got := h.say(t, said.from, said.to, said.text); got != said.text {
					t.Errorf("%q arrives as %q", said.text, got)
				}
				if e := h.expectations(t, node); e != "" {
					t.Errorf("%q is expected: %s", said.text, e)
				}
			}
			// The speaker's own: so much for what this test can see.
			h.say(t, conn, their, "PORT "+ftpPort(client, bouncePort))
			if e := h.expectations(t, node); !strings.Contains(e, fmt.Sprintf("dport=%d", bouncePort)) {
				t.Errorf("a client names itself, and is not expected: %q", e)
			}
			text := "227 Entering Passive Mode (" + ftpPort(pod, bouncePort+1) + ")"
			if got := h.say(t, their, conn, text); got == text || !strings.HasPrefix(got, "227 ") {
				t.Errorf("a server names itself: %q arrives as %q, not translated", text, got)
			}
		})
	}
}

// hostsOwnPort is a port of no Service on which the nodes listen.
const hostsOwnPort = 9999

// takesNoForeignPort has a server, and a client, announce ports that are others'
// at the address that the announcement is translated to: privileged ones, one that the
// node listens on, and another Service's NodePort. The kernel expects connections to
// there before any rule is asked, and before the node's own sockets.
func (h *files) takesNoForeignPort(t *testing.T, s *suite.File, server net.Listener) {
	web := address(t, s, flows.NodePort("a").Of("web"), flows.TCP4).Port()
	h.names(t, "b1", 8000)
	for _, node := range h.Nodes() {
		h.names(t, node, 22, hostsOwnPort, 10250)
	}
	h.names(t, "a0", 22, hostsOwnPort, 10250, web, bouncePort)
	h.names(t, "client0", 22, web, bouncePort)
	// At once: each attempt whose first packet is dropped takes a second.
	t.Run("At", func(t *testing.T) {
		for _, c := range []struct {
			node, from string
			combo      flows.Combo
			taken      map[uint16]string // and who answers there
		}{
			{"a", "client0", flows.TCP4, map[uint16]string{22: "a", web: "b1"}},
			{"b", "client0", flows.TCP4, map[uint16]string{hostsOwnPort: "b", web: "b1"}},
			{"b", "client0", flows.TCP6, map[uint16]string{22: "b"}},
			{"b", "b", flows.TCP4, map[uint16]string{10250: "b"}},
		} {
			at := address(t, s, flows.NodePort(c.node).Of("ftp"), c.combo)
			conn, their := h.begun(t, server, c.from, at)
			t.Run(fmt.Sprintf("%s, asked by %s, %s", c.node, c.from, c.combo), func(t *testing.T) {
				t.Parallel()
				h.passive(t, conn, their, c.from, at.Addr(), bouncePort, "a0", "a0") // so much for what this test can see
				for port, want := range c.taken {
					h.unblock(t, c.node)
					h.passive(t, conn, their, c.from, at.Addr(), port, "a0", want)
				}
				if c.node == "a" { // what a pod asks of another node comes from its own, and is not expected
					for port, want := range map[uint16]bool{bouncePort: true, 22: false, web: false} {
						h.unblock(t, c.node)
						h.active(t, conn, their, port, want)
					}
				}
			})
		}
	})
	if h.Mode == "iptables" {
		return // which variant has the counters is the agent's choice
	}
	out, err := h.client(t.Context(), "a", "nft", "list", "chain", "inet", "spillway", "taken")
	if err != nil || !regexp.MustCompile(`th dport 1-1023 counter packets [1-9]`).MatchString(out) {
		t.Errorf("what was dropped is not counted: %v\n%s", err, out)
	}
}

// passive has the server in a pod announce a port, and the client connect to there.
func (h *files) passive(t *testing.T, conn, their net.Conn, from string, at netip.Addr, port uint16, pod, want string) {
	t.Helper()
	line := fmt.Sprintf("229 Entering Extended Passive Mode (|||%d|)", port)
	if at.Is4() {
		line = "227 Entering Passive Mode (" + ftpPort(h.Addr(pod, false), port) + ")"
	}
	text, to := h.say(t, their, conn, line), netip.AddrPortFrom(at, port)
	if at.Is4() {
		to = parseFTPPort(t, text)
	}
	if to.Addr() != at {
		t.Errorf("the server announces %q, and %q is not translated", line, text)
	}
	if got := h.named(t, from, to); got != want {
		t.Errorf("the server announces port %d, which comes as %q: %q answers there, want %q", port, text, got, want)
	}
}

// active has the client announce a port, and the server in pod a0 connect to there.
func (h *files) active(t *testing.T, conn, their net.Conn, port uint16, want bool) {
	t.Helper()
	text := h.say(t, conn, their, "PORT "+ftpPort(h.Addr("client0", false), port))
	to := parseFTPPort(t, text)
	if to.Addr() == h.Addr("client0", false) {
		t.Errorf("the client announces port %d, and %q is not translated", port, text)
	}
	if got := h.named(t, "a0", to); (got == "client0") != want {
		t.Errorf("the client announces port %d, which comes as %q: %q answers there", port, text, got)
	}
}

// blocksFTP has a server, and a client, repeat an announcement of a port that is the
// node's, so that each first packet that is sent to there meets an expectation.
func (h *files) blocksFTP(t *testing.T, s *suite.File, server net.Listener) {
	other := h.ftpByHand(t, "a1")
	for _, node := range h.Nodes() {
		h.names(t, node, 10250)
	}
	for _, host := range []string{"a0", "a1", "client0", "client1"} {
		h.names(t, host, 10250, bouncePort)
	}
	for _, c := range []struct {
		node, victim string
		combo        flows.Combo
	}{{"a", "client0", flows.TCP4}, {"b", "client0", flows.TCP6}, {"a", "a0", flows.TCP4}} {
		t.Run(fmt.Sprintf("at %s from %s, %s", c.node, c.victim, c.combo), func(t *testing.T) {
			h.unblock(t, c.node)
			at := address(t, s, flows.NodePort(c.node).Of("ftp"), c.combo)
			conn, their := h.begun(t, server, "client0", at)
			liar, text := their, "229 Entering Extended Passive Mode (|||10250|)"
			to := netip.AddrPortFrom(at.Addr(), 10250)
			switch {
			case c.victim == "a0":
				to = netip.AddrPortFrom(their.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(), 10250) // as which the client is masqueraded
				liar, text = conn, "PORT "+ftpPort(h.Addr("client0", false), 10250)
			case at.Addr().Is4():
				text = "227 Entering Passive Mode (" + ftpPort(h.Addr("a0", false), 10250) + ")"
			}
			defer repeat(liar, conn, their, text)()
			h.expects(t, c.node, h.Addr(c.victim, !at.Addr().Is4()), 10250)
			if got := h.named(t, c.victim, to); got != c.node {
				t.Errorf("%s connects to %s, which is %s's, while it is announced: %q", c.victim, to, c.node, got)
			}
			// Others go on, and so does the victim elsewhere.
			conn, their = h.begun(t, server, "client1", at)
			h.passive(t, conn, their, "client1", at.Addr(), bouncePort, "a0", "a0")
			at = address(t, s, flows.NodePort(c.node).Of("other"), c.combo)
			conn, their = h.begun(t, other, "client0", at)
			h.passive(t, conn, their, "client0", at.Addr(), bouncePort, "a1", "a1")
		})
	}
}

// passivePort is one that a server has and its Service, too.
const passivePort = 5003

func passivePorts(name, endpoint string) flows.Service {
	s := service(name, corev1.ProtocolTCP, 21, endpoint)
	s.Ports = append(s.Ports, flows.Port{Name: "passive", Protocol: corev1.ProtocolTCP, Port: passivePort, Target: passivePort})
	return s
}

// announcesItsOwn makes a server announce a port of its own Service. The expectation is
// dropped without an FTP block: the second packet of the connection reaches the server.
func (h *files) announcesItsOwn(t *testing.T, s *suite.File) {
	server := h.ftpByHand(t, "b0")
	h.names(t, "b0", passivePort)
	at := address(t, s, flows.ClusterIP.Of("own"), flows.TCP4)
	conn, their := h.begun(t, server, "a1", netip.AddrPortFrom(at.Addr(), 21))
	for range 2 {
		h.passive(t, conn, their, "a1", at.Addr(), passivePort, "b0", "b0")
	}
}

// opensOnTheNode has a server on the host's network open its passive port at every
// address: that the node listens there is what is wanted.
func (h *files) opensOnTheNode(t *testing.T, s *suite.File) {
	server := h.ftpByHand(t, "a")
	h.names(t, "a", bouncePort+7)
	at := address(t, s, flows.ClusterIP.Of("host"), flows.TCP4)
	for _, from := range []string{"a1", "a", "b"} {
		conn, their := h.begun(t, server, from, at)
		h.passive(t, conn, their, from, at.Addr(), bouncePort+7, "a", "a")
	}
}

// unblock removes the FTP blocks of a node.
func (h *files) unblock(t *testing.T, node string) {
	t.Helper()
	if h.Mode == "iptables" {
		return
	}
	for _, set := range []string{"cut-off4", "cut-off6"} {
		if out, err := h.client(t.Context(), node, "nft", "flush", "set", "inet", "spillway", set); err != nil {
			t.Error(err, out)
		}
	}
}

// begun opens a control connection whose announcements the helper reads: it begins
// behind the first line of each side.
func (h *files) begun(t *testing.T, server net.Listener, from string, at netip.AddrPort) (conn, their net.Conn) {
	t.Helper()
	conn, their = h.control(t, server, from, at)
	h.say(t, their, conn, "220 A line")
	h.say(t, conn, their, "USER a")
	return conn, their
}

// repeat makes one end send a line every 2 ms and the other receive it, until stop.
func repeat(from, conn, their net.Conn, text string) (stop func()) {
	to := conn
	if from == conn {
		to = their
	}
	_ = to.SetReadDeadline(time.Time{})
	go func() { _, _ = io.Copy(io.Discard, to) }()
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			if _, err := io.WriteString(from, text+"\r\n"); err != nil {
				return
			}
		}
	}()
	return func() { close(done); conn.Close(); their.Close() }
}

// expects waits until a node expects a connection to a port.
func (h *files) expects(t *testing.T, node string, from netip.Addr, port uint16) {
	t.Helper()
	await.NoError(t, func() error {
		all := h.expectations(t, node)
		for e := range strings.SplitSeq(all, "; ") {
			if strings.Contains(e, "src="+from.String()+" ") && strings.Contains(e, fmt.Sprintf("dport=%d ", port)) {
				return nil
			}
		}
		return fmt.Errorf("no connection to port %d of %s is expected: %s", port, node, all)
	})
}

// names makes a host send its name to each client that connects to one of its ports.
func (h *files) names(t *testing.T, host string, ports ...uint16) {
	t.Helper()
	machine, err := h.Host(host)
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range ports {
		l, err := machine.Listen(t.Context(), "tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, host+"\n")
				c.Close()
			}
		}()
	}
}

// named connects and returns the name of the server. The client repeats a dropped
// first packet after a second.
func (h *files) named(t *testing.T, from string, to netip.AddrPort) string {
	t.Helper()
	machine, err := h.Host(from)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := machine.Dial(ctx, "tcp", to.String())
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(line)
}

// say has one end of a control connection say a line, and returns what the other hears.
func (h *files) say(t *testing.T, from, to net.Conn, text string) string {
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

// ftpPort writes an address as FTP does.
func ftpPort(a netip.Addr, port uint16) string {
	return fmt.Sprintf("%s,%d,%d", strings.ReplaceAll(a.String(), ".", ","), port>>8, port&255)
}

// parseFTPPort reads it back.
func parseFTPPort(t *testing.T, text string) netip.AddrPort {
	t.Helper()
	var a [4]byte
	var high, low uint16
	from := strings.IndexAny(text, "( ")
	if i := strings.IndexByte(text, '('); i >= 0 {
		from = i
	}
	if _, err := fmt.Sscanf(text[from+1:], "%d,%d,%d,%d,%d,%d", &a[0], &a[1], &a[2], &a[3], &high, &low); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return netip.AddrPortFrom(netip.AddrFrom4(a), high<<8|low)
}

// expectations returns the expectations of a node as text.
func (h *files) expectations(t *testing.T, node string) string {
	t.Helper()
	out, err := h.client(t.Context(), node, "sh", "-c", "conntrack -L expect -f ipv4 && conntrack -L expect -f ipv6")
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
func (h *files) ftpByHand(t *testing.T, on string) net.Listener {
	t.Helper()
	machine, err := h.Host(on)
	if err != nil {
		t.Fatal(err)
	}
	l, err := machine.Listen(t.Context(), "tcp", ":21")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// control opens a control connection: the client's end and the server's.
func (h *files) control(t *testing.T, server net.Listener, from string, at netip.AddrPort) (conn, their net.Conn) {
	t.Helper()
	machine, err := h.Host(from)
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		var err error
		their, err = server.Accept()
		accepted <- err
	}()
	if conn, err = machine.Dial(t.Context(), "tcp", at.String()); err != nil {
		t.Fatal(err)
	}
	select {
	case err = <-accepted:
	case <-time.After(await.Limit):
		err = errors.New("the server accepts no connection")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); their.Close() })
	return conn, their
}
