package ebpf

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/flows"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// newEndNode is a node that ends sockets. The test asks for each walk.
func newEndNode(t *testing.T) *eventNode {
	t.Helper()
	n := newSocketNode(t, func(c *Config) { c.EndSockets = true })
	n.openFlows(t)
	return n
}

// openFlows has the node end sockets.
func (n *eventNode) openFlows(t *testing.T) {
	t.Helper()
	n.onThread(t, func() error { n.flows.Open(); return nil })
	t.Cleanup(n.flows.Close)
}

// outcomes returns the numbers of sockets by protocol and outcome, as in the metric.
func (n *eventNode) outcomes(t *testing.T) map[string]float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	must.Do(t, registry.Register(n.flows))
	families, err := registry.Gather()
	must.Do(t, err)
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "spillway_sockets_ended_total" {
				all[m.GetLabel()[1].GetValue()+" "+m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	return all
}

// endAll makes one walk.
func (n *eventNode) endAll(t *testing.T) {
	t.Helper()
	known, err := n.flows.EndSockets(context.Background())
	must.Do(t, err)
	if !known {
		t.Error("the walk was not complete")
	}
}

// aborted reports whether a socket was ended since the last call. Any other error fails.
func aborted(t *testing.T, fd int) bool {
	t.Helper()
	soft, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	must.Do(t, err)
	if soft != 0 && unix.Errno(soft) != unix.ECONNABORTED {
		t.Fatalf("error of the socket: %v", unix.Errno(soft))
	}
	return soft != 0
}

func wantEnded(t *testing.T, want bool, sockets map[string]int) {
	t.Helper()
	for name, fd := range sockets {
		if have := aborted(t, fd); have != want {
			t.Errorf("%s: ended: %t", name, have)
		}
	}
}

// connected returns a socket of one family that has connected to an address.
func (n *eventNode) connected(t *testing.T, family int, proto uint8, to netip.AddrPort) int {
	t.Helper()
	fd, _ := n.socket(t, family, proto)
	reconnect(t, fd, family, to)
	return fd
}

func reconnect(t *testing.T, fd, family int, to netip.AddrPort) {
	t.Helper()
	if family == unix.AF_INET6 {
		to = netip.AddrPortFrom(netip.AddrFrom16(to.Addr().As16()), to.Port())
	}
	must.Do(t, unix.Connect(fd, sockaddr(to)))
}

// both returns the plan's Service for TCP and UDP with an endpoint at each of these ports.
func both(p *plan, ports ...uint16) (list []*intent.ServicePort) {
	for _, proto := range []uint8{protoTCP, protoUDP} {
		var endpoints []intent.Endpoint
		for _, port := range ports {
			endpoints = append(endpoints, endpoint(p.eth0, port, here))
		}
		list = append(list, service(p, proto, endpoints...))
	}
	return list
}

// listenAt returns a socket that listens at a port of the node.
func (n *eventNode) listenAt(t *testing.T, p *plan, port uint16) {
	t.Helper()
	fd, _ := n.socket(t, domainOf(p), protoTCP)
	must.Do(t, errors.Join(unix.Bind(fd, sockaddr(ap(p.eth0, port))), unix.Listen(fd, 64)))
}

func TestEndSockets(t *testing.T) {
	needSocketIterators(t)
	n := newEndNode(t)
	for name, f := range map[string]func(*testing.T, *plan){
		"Innocent": n.endInnocent, "AddressReused": n.endAddressReused, "Lingering": n.endLingering,
		"ConnectedTwice": n.endConnectedTwice, "HandedOver": n.endHandedOver, "OtherNamespace": n.endOtherNamespace,
		"Unsettled": n.endUnsettled,
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, n.packetNode, func(t *testing.T, p *plan) { f(t, p); n.serve(t); n.endAll(t) })
		})
	}
	t.Run("Mapped", n.endMapped)
	t.Run("Many", n.endMany)
	t.Run("HundredThousand", n.endHundredThousand)
	t.Run("Loop", n.endLoopRuns)
}

// TestEndHandshakes is about an agent without Config.EndSockets.
func TestEndHandshakes(t *testing.T) {
	needSocketIterators(t)
	n := newSocketNode(t)
	n.openFlows(t)
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		silent, other := endpoint(p.far, 8080, elsewhere), endpoint(p.far2, 8080, elsewhere)
		heard := endpoint(p.eth0, 8080, here)
		n.listenAt(t, p, 8080)
		asks := func(to netip.AddrPort) int {
			fd, _ := n.socket(t, domainOf(p), protoTCP)
			must.Do(t, unix.SetNonblock(fd, true))
			if err := unix.Connect(fd, sockaddr(to)); err != unix.EINPROGRESS {
				t.Fatalf("connect to %s: %v, want it to wait", to, err)
			}
			return fd
		}
		n.serve(t, service(p, protoTCP, heard))
		established := n.connected(t, domainOf(p), protoTCP, ap(p.clusterIP, 80))
		second := service(p, protoTCP, silent)
		second.ID.Service.Name, second.Frontends = "second", nil
		n.serve(t, service(p, protoTCP, silent), second)
		lost := asks(ap(p.clusterIP, 80))
		innocent := map[string]int{"established": established, "without a Service": asks(silent.Addr)}
		n.serve(t, service(p, protoTCP, other), second)
		innocent["with a present endpoint"] = asks(ap(p.clusterIP, 80))
		n.endAll(t)
		wantEnded(t, false, map[string]int{"while another Service has the endpoint": lost})
		n.serve(t, service(p, protoTCP, other))
		n.endAll(t)
		wantEnded(t, true, map[string]int{"in a handshake with a removed endpoint": lost})
		wantEnded(t, false, innocent)
	})
}

// endInnocent: only sockets that a connect hook led to the removed endpoint end.
func (n *eventNode) endInnocent(t *testing.T, p *plan) {
	n.listenAt(t, p, 8080)
	n.listenAt(t, p, 8081)
	n.serve(t, both(p, 8081)...)
	to, direct, family := ap(p.clusterIP, 80), ap(p.eth0, 8080), domainOf(p)
	innocent := map[string]int{
		"TCP of another endpoint": n.connected(t, family, protoTCP, to), "UDP of another endpoint": n.connected(t, family, protoUDP, to),
		"TCP without a Service": n.connected(t, family, protoTCP, direct), "UDP without a Service": n.connected(t, family, protoUDP, direct),
	}
	n.serve(t, both(p, 8080)...)
	lost := map[string]int{"TCP": n.connected(t, family, protoTCP, to), "UDP": n.connected(t, family, protoUDP, to)}
	fd, _ := n.socket(t, family, protoUDP)
	must.Do(t, unix.Sendto(fd, []byte("x"), 0, sockaddr(to)))
	innocent["unconnected UDP"] = fd
	n.serve(t, both(p, 8081)...)
	wantEnded(t, false, lost)
	n.serve(t, both(p, 8080, 8081)...)
	n.endAll(t)
	wantEnded(t, false, lost)
	n.serve(t, both(p, 8081)...)
	before := n.outcomes(t)["TCP ended"]
	n.endAll(t)
	wantEnded(t, true, lost)
	wantEnded(t, false, innocent)
	if more := n.outcomes(t)["TCP ended"] - before; more != 1 {
		t.Errorf("%v TCP sockets were counted", more)
	}
}

// endAddressReused: a socket of a later endpoint with the same address has another id.
func (n *eventNode) endAddressReused(t *testing.T, p *plan) {
	n.listenAt(t, p, 8080)
	n.serve(t, both(p, 8080)...)
	to := ap(p.clusterIP, 80)
	older := n.connected(t, domainOf(p), protoUDP, to)
	n.serve(t, both(p)...)
	n.serve(t, both(p, 8080)...)
	newer := n.connected(t, domainOf(p), protoUDP, to)
	if !n.endWith(t, otherServices{Services: n.services, gone: true}) {
		t.Error("the walk was not complete")
	}
	wantEnded(t, true, map[string]int{"older": older})
	wantEnded(t, false, map[string]int{"newer": newer})
}

// endLingering: an endpoint that terminates keeps its sockets until it is gone.
func (n *eventNode) endLingering(t *testing.T, p *plan) {
	n.listenAt(t, p, 8080)
	n.serve(t, both(p, 8080)...)
	to := ap(p.clusterIP, 80)
	sockets := map[string]int{"TCP": n.connected(t, domainOf(p), protoTCP, to), "UDP": n.connected(t, domainOf(p), protoUDP, to)}
	terminating := both(p, 8081)
	for _, sp := range terminating {
		sp.Lingering = []netip.AddrPort{ap(p.eth0, 8080)}
	}
	n.serve(t, terminating...)
	n.endAll(t)
	wantEnded(t, false, sockets)
	n.serve(t, both(p, 8081)...)
	n.endAll(t)
	wantEnded(t, true, sockets)
}

// endConnectedTwice: the last connect() counts.
func (n *eventNode) endConnectedTwice(t *testing.T, p *plan) {
	family := domainOf(p)
	n.serve(t, service(p, protoUDP, endpoint(p.eth0, 8080, here)))
	to := ap(p.clusterIP, 80)
	direct, away, off := n.connected(t, family, protoUDP, to), n.connected(t, family, protoUDP, to), n.connected(t, family, protoUDP, to)
	reconnect(t, direct, family, ap(p.eth0, 8080))
	unspec := make([]byte, 16)
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(off), uintptr(unsafe.Pointer(&unspec[0])), uintptr(len(unspec))); errno != 0 {
		t.Fatal(errno)
	}
	n.serve(t, service(p, protoUDP, endpoint(p.eth0, 8081, here)))
	reconnect(t, away, family, to)
	n.endAll(t)
	wantEnded(t, false, map[string]int{"then connected to the endpoint itself": direct, "then to another endpoint": away, "then to none": off})
	n.serve(t, both(p)...)
	n.endAll(t)
	wantEnded(t, true, map[string]int{"of the second endpoint": away})
	wantEnded(t, false, map[string]int{"connected to the endpoint itself": direct, "connected to none": off})
}

// endHandedOver: a socket ends in another process, too.
func (n *eventNode) endHandedOver(t *testing.T, p *plan) {
	n.listenAt(t, p, 8080)
	n.serve(t, both(p, 8080)...)
	ctx, cancel := context.WithTimeout(context.Background(), await.Limit)
	defer cancel()
	fd, err := unix.Dup(n.connected(t, domainOf(p), protoTCP, ap(p.clusterIP, 80)))
	must.Do(t, err)
	f := os.NewFile(uintptr(fd), "connection")
	cat := exec.CommandContext(ctx, "cat")
	var said bytes.Buffer
	cat.Stdin, cat.Stderr = f, &said
	must.Do(t, cat.Start())
	f.Close()
	n.serve(t, both(p)...)
	n.endAll(t)
	if err := cat.Wait(); err == nil || ctx.Err() != nil || !bytes.Contains(said.Bytes(), []byte("abort")) {
		t.Errorf("the other process: %v, %q", err, said.String())
	}
}

// endOtherNamespace: sockets of a pod end, and one that another namespace's thread connects.
func (n *eventNode) endOtherNamespace(t *testing.T, p *plan) {
	name := fmt.Sprintf("spw-ends-%d", os.Getpid())
	pod := map[string]int{}
	family, to := domainOf(p), ap(p.clusterIP, 80)
	n.serve(t, both(p, 8080)...)
	inNewNetns(t, name, func() {
		lo, err := netlink.LinkByName("lo")
		must.Do(t, err)
		must.Do(t, netlink.LinkSetUp(lo))
		addr, err := netlink.ParseAddr(netip.PrefixFrom(p.eth0, p.eth0.BitLen()).String())
		must.Do(t, err)
		addr.Flags = unix.IFA_F_NODAD
		must.Do(t, netlink.AddrAdd(lo, addr))
		for what, typ := range map[string]int{"TCP": unix.SOCK_STREAM, "UDP": unix.SOCK_DGRAM, "UDP of another's thread": unix.SOCK_DGRAM} {
			fd, err := unix.Socket(family, typ|unix.SOCK_CLOEXEC, 0)
			must.Do(t, err)
			pod[what] = fd
		}
		l, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		must.Do(t, err)
		pod["listener"] = l
		must.Do(t, errors.Join(unix.Bind(l, sockaddr(ap(p.eth0, 8080))), unix.Listen(l, 8)))
		must.Do(t, errors.Join(connectSoon(pod["TCP"], to), connectSoon(pod["UDP"], to)))
	})
	n.onThread(t, func() error { return connectSoon(pod["UDP of another's thread"], to) })
	defer func() {
		for _, fd := range pod {
			unix.Close(fd)
		}
	}()
	same := n.connected(t, family, protoUDP, ap(p.eth0, 8080))
	n.serve(t, both(p)...)
	n.endAll(t)
	wantEnded(t, false, map[string]int{"listener": pod["listener"], "without a Service": same})
	delete(pod, "listener")
	wantEnded(t, true, pod)
}

// connectSoon connects, and repeats it while the kernel has no route: it may add those of a
// new IPv6 address later.
func connectSoon(fd int, to netip.AddrPort) (err error) {
	late := await.Error(func() error {
		if err = unix.Connect(fd, sockaddr(to)); errors.Is(err, unix.ENETUNREACH) {
			return err
		}
		return nil
	})
	return cmp.Or(late, err)
}

// inNewNetns runs f in a new named namespace, which is deleted at the end.
func inNewNetns(t *testing.T, name string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread ends
		ns, err := netns.NewNamed(name)
		if err != nil {
			t.Error(err)
			return
		}
		defer ns.Close()
		f()
	}()
	<-done
	t.Cleanup(func() { _ = netns.DeleteNamed(name) })
	if t.Failed() {
		t.FailNow()
	}
}

// endUnsettled: no socket ends while the decision about a port is unknown.
func (n *eventNode) endUnsettled(t *testing.T, p *plan) {
	n.serve(t, both(p, 8080)...)
	fd := n.connected(t, domainOf(p), protoUDP, ap(p.clusterIP, 80))
	n.serve(t, both(p)...)
	if n.endWith(t, otherServices{Services: n.services, unknown: true}) || aborted(t, fd) {
		t.Error("a socket has ended although a port is unknown")
	}
	n.endAll(t)
	wantEnded(t, true, map[string]int{"UDP": fd})
}

// otherServices has another answer about endpoints: it is unknown, or all are gone.
type otherServices struct {
	flows.Services
	unknown, gone bool
}

func (s otherServices) IfGone(use func(func(objects.TCFrontendKey) bool)) (known bool) {
	if s.unknown {
		return false
	}
	use(func(objects.TCFrontendKey) bool { return s.gone })
	return true
}

// endWith makes one walk of an agent that has these answers. known is false if another is necessary.
func (n *eventNode) endWith(t *testing.T, answers flows.Services) (known bool) {
	t.Helper()
	other := flows.New(&n.cfg, n.objects, answers)
	n.onThread(t, func() error { other.Open(); return nil })
	defer other.Close()
	known, err := other.EndSockets(context.Background())
	must.Do(t, err)
	return known
}

// endMapped: IPv6 sockets that are connected to an IPv4-mapped address.
func (n *eventNode) endMapped(t *testing.T) {
	p := plans["IPv4"]
	n.listenAt(t, p, 8080)
	n.serve(t, both(p, 8080)...)
	to := ap(p.clusterIP, 80)
	sockets := map[string]int{"TCP": n.connected(t, unix.AF_INET6, protoTCP, to), "UDP": n.connected(t, unix.AF_INET6, protoUDP, to)}
	n.serve(t, both(p)...)
	n.endAll(t)
	wantEnded(t, true, sockets)
}

// endMany: one walk ends all sockets, in more than one batch.
func (n *eventNode) endMany(t *testing.T) {
	p := plans["IPv4"]
	n.serve(t, both(p, 8080)...)
	var all []int
	for range 1500 { // three times endBatch
		all = append(all, n.connected(t, unix.AF_INET, protoUDP, ap(p.clusterIP, 80)))
	}
	n.serve(t, both(p, 8081)...)
	n.endAll(t)
	remain := map[int]netip.AddrPort{}
	for _, fd := range all {
		if !aborted(t, fd) {
			remain[fd] = sourceOf(t, fd)
		}
	}
	if len(remain) > 0 {
		t.Fatalf("%d sockets remain: %v, outcomes %v", len(remain), remain, n.outcomes(t))
	}
}

// parkedMost is the maximum number of sockets in one message (SCM_MAX_FD of include/net/scm.h).
const parkedMost = 253

// park opens so many sockets with open, more than a process may have: they wait in the queues
// of Unix sockets that no process reads, until the test ends.
func park(t *testing.T, count int, open func() (fd int, err error)) {
	t.Helper()
	queue := -1
	for count > 0 {
		var fds []int
		for range min(parkedMost, count) {
			fd, err := open()
			must.Do(t, err)
			fds = append(fds, fd)
		}
		count -= len(fds)
		send := func() error {
			return unix.Sendmsg(queue, []byte("x"), unix.UnixRights(fds...), nil, unix.MSG_DONTWAIT)
		}
		if queue < 0 || send() != nil { // it is full
			queue = newQueue(t)
			must.Do(t, send())
		}
		for _, fd := range fds {
			must.Do(t, unix.Close(fd))
		}
	}
}

func newQueue(t *testing.T) int {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must.Do(t, err)
	t.Cleanup(func() { must.Do(t, errors.Join(unix.Close(ends[0]), unix.Close(ends[1]))) })
	return ends[0]
}

// endHundredThousand: one walk ends 100,000 sockets, and new connect() calls succeed meanwhile. With
// -short it ends 20,000: they take several reads of the kernel's list, too.
func (n *eventNode) endHundredThousand(t *testing.T) {
	count := 100_000
	if testing.Short() {
		count = 20_000
	}
	p := plans["IPv4"]
	n.serve(t, both(p, 8080)...)
	to, opened := ap(p.clusterIP, 80), 0
	park(t, count, func() (fd int, err error) {
		n.onThread(t, func() error {
			fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			return err
		})
		// A local address has about 28,000 ports.
		opened++
		local := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 1, byte(opened / 20_000)}}
		return fd, errors.Join(unix.Bind(fd, local), unix.Connect(fd, sockaddr(to)))
	})
	n.serve(t, both(p, 8081)...)
	fd, _ := n.socket(t, unix.AF_INET, protoUDP)
	stop, connects := make(chan struct{}), make(chan string)
	go func() {
		done, longest, failed := 0, time.Duration(0), 0
		for {
			select {
			case <-stop:
				connects <- fmt.Sprintf("%d of %d connect() calls failed, the longest took %v", failed, done, longest)
				return
			default:
			}
			began := time.Now()
			if unix.Connect(fd, sockaddr(to)) != nil {
				failed++
			}
			done, longest = done+1, max(longest, time.Since(began))
		}
	}()
	before, began := n.outcomes(t)["UDP ended"], time.Now()
	n.endAll(t)
	took := time.Since(began)
	close(stop)
	text := <-connects
	t.Logf("%d sockets ended in %v; %s", count, took, text)
	if ended := n.outcomes(t)["UDP ended"] - before; ended != float64(count) {
		t.Errorf("%v of %d sockets ended; outcomes %v", ended, count, n.outcomes(t))
	}
	if strings.HasPrefix(text, "0 of 0 ") || !strings.HasPrefix(text, "0 of ") {
		t.Errorf("while the sockets ended, %s", text)
	}
	wantEnded(t, false, map[string]int{"of the present endpoint": fd})
}

// endLoopRuns: the agent's loop ends a socket on which a process waits.
func (n *eventNode) endLoopRuns(t *testing.T) {
	p := plans["IPv4"]
	n.listenAt(t, p, 8080)
	n.serve(t, both(p, 8080)...)
	fd := n.connected(t, unix.AF_INET, protoTCP, ap(p.clusterIP, 80))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); n.flows.Run(ctx) }()
	defer func() { cancel(); <-done }()
	read := make(chan error)
	go func() {
		_, err := unix.Read(fd, make([]byte, 1))
		read <- err
	}()
	time.Sleep(200 * time.Millisecond) // four times endGrace: the first walk is over, and the time below is of a running agent
	began := time.Now()
	n.serve(t, both(p)...)
	if err := <-read; !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("read: %v", err)
	}
	t.Logf("from the removal of the endpoint to the error: %s", time.Since(began))
}
