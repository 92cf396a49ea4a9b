package ebpf

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// newSocketNode is an eventNode whose socket hooks are attached, and whose tc programs do nothing. The
// test's own process is in their cgroup until the test ends.
func newSocketNode(t *testing.T, change ...func(*Config)) *eventNode {
	t.Helper()
	n := readEvents(t, newNode(t, ebpf.SchedCLS, append([]func(*Config){reportAll}, change...)...))
	before := ownCgroup(t)
	cgroup := n.attachSockets(t, "sockets")
	join(t, cgroup)
	t.Cleanup(func() { join(t, before) })
	return n
}

// ownCgroup returns the directory of this process's cgroup2.
func ownCgroup(t testing.TB) string {
	t.Helper()
	mount, err := kernel.Cgroup2Mount()
	if err != nil {
		t.Skip(err)
	}
	text, err := os.ReadFile("/proc/self/cgroup")
	must.Do(t, err)
	_, own, _ := strings.Cut(string(text), "0::")
	own, _, _ = strings.Cut(own, "\n")
	return filepath.Join(mount, own)
}

func join(t testing.TB, cgroup string) {
	t.Helper()
	must.Do(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0))
}

// attachSockets attaches the node's socket hooks to a new cgroup, and returns its directory.
func (n *packetNode) attachSockets(t testing.TB, name string) string {
	t.Helper()
	mount, err := kernel.Cgroup2Mount()
	must.Do(t, err)
	cgroup := filepath.Join(mount, fmt.Sprintf("spw-test-%d-%s", os.Getpid(), name))
	must.Do(t, os.Mkdir(cgroup, 0o755))
	t.Cleanup(func() { must.Do(t, os.Remove(cgroup)) })
	n.live, n.spent = true, true // its sockets may wait in TIME_WAIT
	must.Do(t, attach.AttachCgroup(n.cfg.BPFFS, cgroup, n.objects.SocketPrograms()))
	t.Cleanup(func() { must.Do(t, attach.DetachCgroup(n.cfg.BPFFS)) })
	n.onThread(t, func() error {
		lo, err := netlink.LinkByName("lo")
		return errors.Join(err, netlink.LinkSetUp(lo))
	})
	return cgroup
}

// socket opens a socket in the node's network namespace. It is closed at the end, if the test
// does not do it.
func (n *eventNode) socket(t *testing.T, family int, proto uint8) (fd int, closeNow func()) {
	t.Helper()
	typ := unix.SOCK_STREAM
	if proto == protoUDP {
		typ = unix.SOCK_DGRAM
	}
	n.onThread(t, func() (err error) {
		fd, err = unix.Socket(family, typ|unix.SOCK_CLOEXEC, 0)
		return err
	})
	open := true
	closeNow = func() {
		if open {
			must.Do(t, unix.Close(fd))
		}
		open = false
	}
	t.Cleanup(closeNow)
	wait := &unix.Timeval{Sec: 20}
	must.Do(t, errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, wait),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)))
	return fd, closeNow
}

func domainOf(p *plan) int {
	if p.eth0.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// listen returns a socket that listens at the endpoint.
func (n *eventNode) listen(t *testing.T, p *plan) (listener int) {
	t.Helper()
	listener, _ = n.socket(t, domainOf(p), protoTCP)
	must.Do(t, unix.Bind(listener, sockaddr(ap(p.eth0, 8080))))
	must.Do(t, unix.Listen(listener, 8))
	return listener
}

// dialed is a connection to a Service, with both of its sockets.
type dialed struct {
	client, server           int
	closeClient, closeServer func()
	source                   netip.AddrPort
}

func (n *eventNode) dial(t *testing.T, family, listener int, to netip.AddrPort) (d dialed) {
	t.Helper()
	d.client, d.closeClient = n.socket(t, family, protoTCP)
	if family == unix.AF_INET6 {
		to = netip.AddrPortFrom(netip.AddrFrom16(to.Addr().As16()), to.Port())
	}
	must.Do(t, unix.Connect(d.client, sockaddr(to)))
	var err error
	d.server, _, err = unix.Accept4(listener, unix.SOCK_CLOEXEC)
	must.Do(t, err)
	open := true
	d.closeServer = func() {
		if open {
			must.Do(t, unix.Close(d.server))
		}
		open = false
	}
	t.Cleanup(d.closeServer)
	d.source = sourceOf(t, d.client)
	return d
}

func sourceOf(t *testing.T, fd int) netip.AddrPort {
	t.Helper()
	name, err := unix.Getsockname(fd)
	must.Do(t, err)
	return addrPortOf(t, name)
}

func addrPortOf(t *testing.T, name unix.Sockaddr) netip.AddrPort {
	t.Helper()
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	t.Fatalf("socket with the address %v", name)
	return netip.AddrPort{}
}

// waitEnd waits until a socket has seen the other side's end.
func waitEnd(t *testing.T, fd int) {
	t.Helper()
	if size, err := unix.Read(fd, make([]byte, 1)); size > 0 {
		t.Fatalf("%d bytes, %v: want the end", size, err)
	}
}

// wantSoon waits for these events: the kernel may close a socket after close() has returned.
func (n *eventNode) wantSoon(t *testing.T, want ...string) (events []dataplane.FlowEvent) {
	t.Helper()
	var have []string
	await.NoError(t, func() error {
		for _, e := range n.events(t) {
			events = append(events, e)
			have = append(have, strings.TrimSpace(e.Kind.String()+" "+e.Reason))
		}
		if len(have) < len(want) {
			return fmt.Errorf("events %q, want %q", have, want)
		}
		return nil
	})
	if !slices.Equal(have, want) {
		t.Fatalf("events %q, want %q", have, want)
	}
	return events
}

func TestSocketEvents(t *testing.T) {
	n := newSocketNode(t)
	for name, f := range map[string]func(*testing.T, *plan){
		"Connection": n.socketConnection, "ServerEndsFirst": n.socketServerEndsFirst, "Resets": n.socketResets,
		"Unanswered": n.socketUnanswered, "Silent": n.socketSilent, "Failed": n.socketFailed, "Datagrams": n.socketDatagrams,
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, n.packetNode, func(t *testing.T, p *plan) { n.restart(t); f(t, p); n.want(t) })
		})
	}
	t.Run("Mapped", n.socketMapped)
	t.Run("Off", n.socketOff)
}

// wantSocketFlow checks what all events of a TCP connection have.
func wantSocketFlow(t *testing.T, p *plan, source netip.AddrPort, events []dataplane.FlowEvent) {
	t.Helper()
	for _, e := range events {
		wantFlow(t, e, protoTCP, source, ap(p.clusterIP, 80), ap(p.eth0, 8080))
		f := e.Flow
		if !f.BySocket || f.Opened.IsZero() || f.Opened.After(e.Time) {
			t.Errorf("%s at %s: by socket %t, opened %s", e.Kind, e.Time, f.BySocket, f.Opened)
		}
		if answered := e.Kind != dataplane.FlowOpened; answered != (f.Handshake > 0) || answered != (f.SmoothedRTT > 0) ||
			f.Handshake > 10*time.Second || f.SmoothedRTT > 10*time.Second {
			t.Errorf("%s: handshake %s, smoothed RTT %s", e.Kind, f.Handshake, f.SmoothedRTT)
		}
	}
	// The handshake is the only measurement of the RTT so far, with the time of system calls.
	if f := events[1].Flow; f.SmoothedRTT > f.Handshake {
		t.Errorf("smoothed RTT %s after a handshake of %s", f.SmoothedRTT, f.Handshake)
	}
	if opened, closed := events[0].Flow.Opened, events[len(events)-1].Flow.Opened; opened.Sub(closed).Abs() > 5*time.Second {
		t.Errorf("opened at %s, according to the last event at %s", opened, closed)
	}
}

func (n *eventNode) socketConnection(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
	d := n.dial(t, domainOf(p), n.listen(t, p), ap(p.clusterIP, 80))
	echo(t, d.client, d.server, make([]byte, 1000))
	echo(t, d.server, d.client, make([]byte, 20000))
	must.Do(t, unix.Shutdown(d.client, unix.SHUT_WR))
	waitEnd(t, d.server)
	d.closeServer()
	waitEnd(t, d.client)
	events := n.wantSoon(t, "opened", "answered", "closed FIN")
	wantSocketFlow(t, p, d.source, events)
	f := events[2].Flow
	// A FIN counts as a byte.
	if f.BytesToEndpoint != 1001 || f.BytesToClient != 20001 {
		t.Errorf("%d bytes to the endpoint, %d to the client", f.BytesToEndpoint, f.BytesToClient)
	}
	// SYN, ACK, data, FIN; SYN-ACK, data, FIN.
	if f.PacketsToEndpoint < 4 || f.PacketsToClient < 3 || f.PacketsToEndpoint > 100 || f.PacketsToClient > 100 {
		t.Errorf("%d packets to the endpoint, %d to the client", f.PacketsToEndpoint, f.PacketsToClient)
	}
}

func (n *eventNode) socketServerEndsFirst(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
	d := n.dial(t, domainOf(p), n.listen(t, p), ap(p.clusterIP, 80))
	must.Do(t, unix.Shutdown(d.server, unix.SHUT_WR))
	waitEnd(t, d.client)
	n.want(t, "opened", "answered")
	d.closeClient()
	wantFlow(t, n.wantSoon(t, "closed FIN")[0], protoTCP, d.source, ap(p.clusterIP, 80), ap(p.eth0, 8080))
}

func (n *eventNode) socketResets(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
	listener := n.listen(t, p)
	byClient := func(d dialed) (int, func()) { return d.client, d.closeClient }
	byServer := func(d dialed) (int, func()) { return d.server, d.closeServer }
	for _, by := range []func(dialed) (int, func()){byClient, byServer} {
		d := n.dial(t, domainOf(p), listener, ap(p.clusterIP, 80))
		fd, closeNow := by(d)
		must.Do(t, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		closeNow()
		wantSocketFlow(t, p, d.source, n.wantSoon(t, "opened", "answered", "closed RST"))
	}
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8081, here)))
	fd, _ := n.socket(t, domainOf(p), protoTCP)
	if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("connect to a port that does not listen: %v", err)
	}
	n.wantSoon(t, "opened", "closed RST")
}

// socketUnanswered: no endpoint answers, until the kernel or the process gives up.
func (n *eventNode) socketUnanswered(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	fd, _ := n.socket(t, domainOf(p), protoTCP)
	must.Do(t, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 1))
	if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ETIMEDOUT) {
		t.Fatalf("connect to an endpoint that does not answer: %v", err)
	}
	n.wantSoon(t, "opened", "closed timeout")
	fd, closeNow := n.socket(t, domainOf(p), protoTCP)
	must.Do(t, unix.SetNonblock(fd, true))
	if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.EINPROGRESS) {
		t.Fatalf("connect without waiting: %v", err)
	}
	closeNow()
	for _, e := range n.wantSoon(t, "opened", "closed timeout") {
		if e.Flow.Endpoint != ap(p.far, 8080) || e.Flow.BytesToEndpoint != 0 || e.Flow.Handshake != 0 {
			t.Errorf("%s: %+v", e.Kind, e.Flow)
		}
	}
}

// socketSilent: the server receives no more, and the client gives up.
func (n *eventNode) socketSilent(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
	d := n.dial(t, domainOf(p), n.listen(t, p), ap(p.clusterIP, 80))
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	must.Do(t, unix.SetsockoptSockFprog(d.server, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop}))
	must.Do(t, unix.SetsockoptInt(d.client, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 1))
	_, err := unix.Write(d.client, []byte("lost"))
	must.Do(t, err)
	if _, err := unix.Read(d.client, make([]byte, 1)); !errors.Is(err, unix.ETIMEDOUT) {
		t.Errorf("read from a silent server: %v", err)
	}
	wantSocketFlow(t, p, d.source, n.wantSoon(t, "opened", "answered", "closed timeout"))
}

// socketFailed: a connect() to a Service that sends no SYN has no events, and its socket may
// connect to another peer.
func (n *eventNode) socketFailed(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.listen(t, p)
	fd, _ := n.socket(t, domainOf(p), protoTCP)
	n.unreachable(t, p.far, func() {
		if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("connect to an endpoint without a route: %v", err)
		}
	})
	must.Do(t, unix.Connect(fd, sockaddr(ap(p.eth0, 8080))))
}

func (n *eventNode) socketDatagrams(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.eth0, 8080, here)))
	fd, closeNow := n.socket(t, domainOf(p), protoUDP)
	must.Do(t, unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))))
	source := sourceOf(t, fd)
	wantFlow(t, n.want(t, "opened")[0], protoUDP, netip.AddrPort{}, ap(p.clusterIP, 80), ap(p.eth0, 8080))
	must.Do(t, unix.Connect(fd, sockaddr(ap(p.externalIP, 80))))
	events := n.want(t, "closed socket closed", "opened")
	wantFlow(t, events[0], protoUDP, netip.AddrPort{}, ap(p.clusterIP, 80), ap(p.eth0, 8080))
	wantFlow(t, events[1], protoUDP, netip.AddrPort{}, ap(p.externalIP, 80), ap(p.eth0, 8080))
	closeNow()
	closed := n.want(t, "closed socket closed")[0]
	wantFlow(t, closed, protoUDP, source, ap(p.externalIP, 80), ap(p.eth0, 8080))
	if f := closed.Flow; !f.BySocket || f.Opened.IsZero() || f.Opened.After(closed.Time) {
		t.Errorf("by socket %t, opened %s", f.BySocket, f.Opened)
	}
	// sendto() makes no flow.
	fd, _ = n.socket(t, domainOf(p), protoUDP)
	must.Do(t, unix.Sendto(fd, []byte("x"), 0, sockaddr(ap(p.clusterIP, 80))))
}

// socketMapped: an IPv6 socket connects to ::ffff:a.b.c.d.
func (n *eventNode) socketMapped(t *testing.T) {
	p := plans["IPv4"]
	n.restart(t)
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)), service(p, protoUDP, endpoint(p.eth0, 8080, here)))
	d := n.dial(t, unix.AF_INET6, n.listen(t, p), ap(p.clusterIP, 80))
	must.Do(t, unix.Shutdown(d.client, unix.SHUT_WR))
	waitEnd(t, d.server)
	d.closeServer()
	wantSocketFlow(t, p, d.source, n.wantSoon(t, "opened", "answered", "closed FIN"))
	fd, closeNow := n.socket(t, unix.AF_INET6, protoUDP)
	to := netip.AddrPortFrom(netip.AddrFrom16(p.clusterIP.As16()), 80)
	must.Do(t, unix.Connect(fd, sockaddr(to)))
	source := sourceOf(t, fd)
	closeNow()
	wantFlow(t, n.want(t, "opened", "closed socket closed")[1], protoUDP, source, ap(p.clusterIP, 80), ap(p.eth0, 8080))
}

// socketOff: an agent that ends turns the events off, and its programs stay.
func (n *eventNode) socketOff(t *testing.T) {
	p := plans["IPv4"]
	n.restart(t)
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)), service(p, protoUDP, endpoint(p.eth0, 8080, here)))
	listener := n.listen(t, p)
	before := n.dial(t, domainOf(p), listener, ap(p.clusterIP, 80))
	n.want(t, "opened", "answered")
	must.Do(t, n.flows.StopEvents())
	after := n.dial(t, domainOf(p), listener, ap(p.clusterIP, 80))
	for _, d := range []dialed{before, after} {
		d.closeServer()
		waitEnd(t, d.client)
		d.closeClient()
	}
	fd, closeNow := n.socket(t, unix.AF_INET, protoUDP)
	must.Do(t, unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))))
	closeNow()
	n.want(t)
}

// Flows of sockets are reported on demand as others are.
func TestSocketEventsOnDemand(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEvents = EventsOnDemand })
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)), service(p, protoUDP, endpoint(p.eth0, 8080, here)))
	listener := n.listen(t, p)
	use := func() {
		t.Helper()
		d := n.dial(t, domainOf(p), listener, ap(p.clusterIP, 80))
		d.closeServer()
		waitEnd(t, d.client)
		d.closeClient()
		fd, closeNow := n.socket(t, unix.AF_INET, protoUDP)
		must.Do(t, unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))))
		closeNow()
	}
	use()
	n.want(t)
	n.report(t, dataplane.FlowSelection{All: true})
	use()
	n.wantSoon(t, "opened", "answered", "closed FIN", "opened", "closed socket closed")
	must.Do(t, n.SwitchFlows(dataplane.FlowSelection{}))
	use()
	n.want(t)
}

// Flows of sockets are sampled as others are: a flow has all its events or none.
func TestSocketEventsSample(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEventsSample = 4 })
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)), service(p, protoUDP, endpoint(p.eth0, 8080, here)))
	listener := n.listen(t, p)
	const flows = 100 // of each protocol
	for range flows {
		d := n.dial(t, domainOf(p), listener, ap(p.clusterIP, 80))
		must.Do(t, unix.SetsockoptLinger(d.client, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		d.closeClient()
		d.closeServer()
		fd, closeNow := n.socket(t, unix.AF_INET, protoUDP)
		must.Do(t, unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))))
		closeNow()
	}
	seen := map[string]int{}
	for _, e := range n.events(t) {
		seen[e.Kind.String()+" "+net.JoinHostPort(e.Flow.Port.Service.Name, "")]++
	}
	opened := 0
	for _, name := range []string{"web-6:", "web-17:"} {
		opened += seen["opened "+name]
		if seen["opened "+name] == 0 || seen["opened "+name] == flows || seen["closed "+name] != seen["opened "+name] {
			t.Errorf("events %v of %d flows", seen, flows)
		}
	}
	if left := n.FlowEventCounts().LeftOut; int(left) != 2*flows-opened {
		t.Errorf("%d left out, of %v", left, seen)
	}
}

// A flood of one Service leaves the other its events.
func TestSocketEventsRate(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEventsRate = 1 })
	p, other := plans["IPv4"], plans["IPv6"]
	n.serve(t, service(p, protoUDP, endpoint(p.eth0, 8080, here)), service(other, protoUDP, endpoint(other.eth0, 8080, here)))
	const flood = 50
	connect := func(p *plan) {
		fd, closeNow := n.socket(t, domainOf(p), protoUDP)
		must.Do(t, unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))))
		closeNow()
	}
	begun := time.Now()
	for range flood {
		connect(p)
	}
	// A token a second, one at first, and one for the coarse clock. A flow has two events.
	most := 2 * (int(time.Since(begun)/time.Second) + 2)
	connect(other)
	seen := map[bool]int{}
	for _, e := range n.events(t) {
		seen[e.Flow.ServiceAddress.Addr().Is6()]++
	}
	if seen[false] < 2 || seen[false] > most || seen[true] != 2 {
		t.Errorf("%d events of the flood, %d of the other Service", seen[false], seen[true])
	}
}

// wantHandshakes wants so many handshakes and connections of all Services since they were last
// reset, and returns the sum of their times.
func (n *eventNode) wantHandshakes(t *testing.T, connections, handshakes uint64) time.Duration {
	t.Helper()
	counters, err := n.ServiceCounters()
	must.Do(t, err)
	var made, answered uint64
	var took time.Duration
	for _, c := range counters {
		made += c.Connections
		took += c.HandshakeSum
		for _, v := range c.Handshakes {
			answered += v
		}
	}
	if made != connections || answered != handshakes || handshakes > 0 && (took <= 0 || took > 10*time.Second*time.Duration(handshakes)) {
		t.Errorf("%d connections, %d handshakes of %s in all; want %d and %d", made, answered, took, connections, handshakes)
	}
	empty[uint32, []objects.TCServiceCounts](t, n.m(objects.TCMapServiceCounters))
	return took
}

// The metrics of a Service have the handshakes of sockets, with and without events.
func TestSocketHandshakes(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Config)
		events []string // of a connection
	}{
		{"Alone", func(c *Config) { c.FlowEvents = EventsOff }, nil},
		{"WithEvents", func(*Config) {}, []string{"opened", "answered", "closed FIN"}},
		{"NotInTheSample", func(c *Config) { c.FlowEventsSample = 1 << 31 }, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newSocketNode(t, func(c *Config) { c.ServiceMetrics = true }, tt.change)
			eachFamily(t, n.packetNode, func(t *testing.T, p *plan) { n.handshakes(t, domainOf(p), p, tt.events) })
			t.Run("Mapped", func(t *testing.T) { n.handshakes(t, unix.AF_INET6, plans["IPv4"], tt.events) })
		})
	}
}

func (n *eventNode) handshakes(t *testing.T, family int, p *plan, want []string) {
	n.restart(t)
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
	listener := n.listen(t, p)
	const connections = 3
	var took time.Duration // of the events
	for range connections {
		d := n.dial(t, family, listener, ap(p.clusterIP, 80))
		echo(t, d.client, d.server, make([]byte, 100))
		must.Do(t, unix.Shutdown(d.client, unix.SHUT_WR))
		waitEnd(t, d.server)
		d.closeServer()
		waitEnd(t, d.client)
		for _, e := range n.wantSoon(t, want...) {
			if e.Kind == dataplane.FlowAnswered {
				took += e.Flow.Handshake.Truncate(time.Microsecond)
			}
		}
	}
	if counted := n.wantHandshakes(t, connections, connections); want != nil && counted != took {
		t.Errorf("handshakes of %s are counted, the events have %s", counted, took)
	}

	// A connection that is refused has no handshake, nor has the next one of its socket, which
	// is not to a Service.
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8081, here)))
	fd, _ := n.socket(t, domainOf(p), protoTCP)
	if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("connect to a port that does not listen: %v", err)
	}
	must.Do(t, unix.Connect(fd, sockaddr(ap(p.eth0, 8080))))
	n.wantHandshakes(t, 1, 0)
	if want != nil {
		n.wantSoon(t, "opened", "closed RST")
	}
	n.want(t)
}

// The program that counts handshakes of TCP is always attached, and that of UDP while events of flows
// are wanted.
func TestSocketEventHooks(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	state := intent.State{Ports: []*intent.ServicePort{objectstest.SimplePort(1, 1)}, Node: intent.Node{Name: "node"}}
	want := func(udp int) {
		t.Helper()
		dir, err := os.Open(cfg.CgroupRoot)
		must.Do(t, err)
		defer dir.Close()
		wantAttached(t, link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupSockOps}, 1)
		wantAttached(t, link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCgroupInetSockRelease}, udp)
		wantAttached(t, link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupInet4Connect}, 1)
	}
	for _, step := range []struct {
		events  string
		metrics bool
		udp     int
	}{
		{EventsRefused, false, 0}, {EventsAll, false, 1}, {EventsAll, false, 1}, {EventsOff, false, 0},
		{EventsRefused, true, 0}, {EventsAll, true, 1}, {EventsOnDemand, false, 1},
	} {
		cfg.FlowEvents, cfg.ServiceMetrics = step.events, step.metrics
		runBackend(t, cfg, state, nil)
		want(step.udp)
	}
	must.Do(t, upgrade.Cleanup(cfg))
	dir, err := os.Open(cfg.CgroupRoot)
	must.Do(t, err)
	defer dir.Close()
	for typ := range objects.SocketEventPrograms {
		wantAttached(t, link.QueryOptions{Target: int(dir.Fd()), Attach: typ}, 0)
	}
}

// echo writes a message to one socket, and reads it from the other.
func echo(t *testing.T, from, to int, message []byte) {
	t.Helper()
	if _, err := unix.Write(from, message); err != nil {
		t.Fatalf("write %d bytes: %v", len(message), err)
	}
	got := make([]byte, 0, len(message))
	part := make([]byte, len(message))
	for len(got) < len(message) {
		size, err := unix.Read(to, part)
		if err != nil || size == 0 {
			t.Fatalf("read %d bytes after %d: %v", len(message), len(got), err)
		}
		got = append(got, part[:size]...)
	}
	if !bytes.Equal(got, message) {
		t.Errorf("%d bytes arrive changed", len(message))
	}
}
