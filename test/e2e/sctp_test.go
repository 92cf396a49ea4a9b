package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

const sctpPort, sctpServerPort = 80, 8080

// sctpWait is how long a socket waits for the other end. The first retransmission of an
// INIT comes after 3 s.
const sctpWait = 30 * time.Second

// TestSCTPChangesItsDataplane restarts an agent with and without --ebpf-sctp. Running
// associations continue, and new ones belong to the other dataplane. Only without the
// flag, a process of the node has the Service.
func TestSCTPChangesItsDataplane(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		t.Skipf("needs SCTP sockets in the kernel: %v", err)
	}
	must(t, unix.Close(fd))
	t.Parallel()
	spec := topology.DefaultSpec("e2e-sctp")
	spec.Conntrack = true
	e := &sctpNode{env: &env{Harness: harness.Start(t, cluster.Config{Spec: spec, NoAgents: true})}}
	must(t, e.Agent("a").Start(t.Context()))
	e.waitVerified(t)
	e.serve(t)
	e.open(t, "nftables", "a1", "client0", "a")
	e.wantEBPF(t, 0)

	e.restartWith(t, "--ebpf-sctp")
	e.talk(t, "with the flag")
	await.True(t, "no table of nftables", func() bool {
		return !strings.Contains(e.Output(t, "a", "nft", "list", "tables"), "table inet spillway\n")
	})
	e.talk(t, "with the flag, when nftables has gone")
	tracked := e.tracked(t)
	opened := e.open(t, "ebpf", "a1", "client0")
	if now := e.tracked(t); now > tracked {
		t.Errorf("%d associations, opened with the flag, have added %d entries to conntrack", opened, now-tracked)
	}
	e.wantEBPF(t, opened)
	e.wantNone(t, "a")

	e.restartWith(t)
	e.talk(t, "without the flag")
	e.open(t, "nftables again", "a1", "client0", "a")
	e.wantEBPF(t, opened)
	e.talk(t, "at the end")
}

// restartWith restarts the agent of node a with flags.
func (e *sctpNode) restartWith(t *testing.T, flags ...string) {
	t.Helper()
	e.Flags = map[string][]string{"": flags}
	e.restart(t, "a", syscall.SIGTERM)
	e.waitVerified(t)
}

// waitVerified waits until the agent is ready. On a busy machine, the emulated CPU of
// hack/vm verifies the programs for longer than WaitReady waits. So only the end of the
// agent ends the wait, or of the time that the test has.
func (e *sctpNode) waitVerified(t *testing.T) {
	t.Helper()
	deadline, limited := t.Deadline()
	for {
		err := e.Agent("a").WaitReady(t.Context())
		if err == nil {
			return
		}
		if e.Agent("a").Ended() != nil || !limited || time.Until(deadline) < 3*time.Minute {
			t.Fatal(err)
		}
	}
}

// sctpNode is a cluster with an agent on node a, with Services of SCTP and associations.
type sctpNode struct {
	*env
	fronts       []sctpFront
	associations []sctpAssociation
	port         uint16 // of the last client
}

// sctpFront is an address of a Service.
type sctpFront struct {
	what     string
	to       netip.AddrPort
	external bool // for clients outside
}

type sctpAssociation struct {
	name string
	fd   int
}

// serve loads a Service with an endpoint on the client's node, and one with an endpoint
// elsewhere. Servers echo.
func (e *sctpNode) serve(t *testing.T) {
	t.Helper()
	var services []flows.Object
	endpoints := []string{"a0", "b0"}
	for _, on := range endpoints {
		services = append(services, flows.Service{
			Name: on, Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(on),
			Ports: []flows.Port{{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: sctpPort, Target: sctpServerPort}},
		})
		for _, v6 := range []bool{false, true} {
			fd := e.socket(t, on, netip.AddrPortFrom(e.Addr(on, v6), sctpServerPort))
			must(t, unix.Listen(fd, 64))
			echoSCTP(t, fd)
		}
	}
	s := e.NewFile()
	s.MustWrite(t, services...)
	must(t, s.WaitOn(t.Context(), "a"))
	for _, on := range endpoints {
		for _, v6 := range []bool{false, true} {
			e.fronts = append(e.fronts,
				sctpFront{"cluster IP of " + on, netip.AddrPortFrom(s.Scope.ClusterIP(on, v6), sctpPort), false},
				sctpFront{"NodePort of " + on, netip.AddrPortFrom(e.Addr("a", v6), uint16(s.Scope.NodePort(on, "sctp"))), true})
		}
	}
}

// echoSCTP answers on all associations of a listening socket until the test ends.
func echoSCTP(t *testing.T, listener int) {
	var stop atomic.Bool
	var accepting sync.WaitGroup
	must(t, unix.SetsockoptTimeval(listener, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}))
	accepting.Go(func() {
		for !stop.Load() {
			if fd, _, err := unix.Accept(listener); err == nil {
				go echoOn(fd)
			}
		}
	})
	t.Cleanup(func() { stop.Store(true); accepting.Wait(); _ = unix.Close(listener) })
}

// echoOn answers on an association until its client ends it.
func echoOn(fd int) {
	defer unix.Close(fd)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{})
	for buf := make([]byte, 2048); ; {
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		if _, err := unix.Write(fd, buf[:n]); err != nil {
			return
		}
	}
}

// socket opens a socket of a host with one address: an INIT names all addresses of a
// socket, and peers would use them beside the Service's.
func (e *sctpNode) socket(t *testing.T, host string, bind netip.AddrPort) (fd int) {
	t.Helper()
	family := unix.AF_INET
	if bind.Addr().Is6() {
		family = unix.AF_INET6
	}
	e.Do(t, host, func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		return err
	})
	wait := unix.NsecToTimeval(int64(sctpWait))
	must(t, errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait),
		unix.Bind(fd, socketAddr(bind))))
	return fd
}

func socketAddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// dial opens an association. The error is the client's.
func (e *sctpNode) dial(t *testing.T, from string, f sctpFront, wait time.Duration) (fd int, err error) {
	t.Helper()
	e.port++
	fd = e.socket(t, from, netip.AddrPortFrom(e.Addr(from, f.to.Addr().Is6()), 40000+e.port))
	t.Cleanup(func() { _ = unix.Close(fd) })
	limit := unix.NsecToTimeval(int64(wait))
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		// A signal of Go's interrupts connect, which continues in the kernel.
		switch err = unix.Connect(fd, socketAddr(f.to)); {
		case errors.Is(err, unix.EISCONN):
			return fd, nil
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EALREADY), time.Now().After(deadline):
			return fd, err
		}
	}
}

// open opens associations that stay, from each client to each address that it may use,
// and returns their number.
func (e *sctpNode) open(t *testing.T, what string, clients ...string) (opened int) {
	t.Helper()
	for _, from := range clients {
		for _, f := range e.fronts {
			if f.external != (from == "client0") {
				continue
			}
			name := fmt.Sprintf("%s: %s to %s at %s", what, from, f.what, f.to)
			fd, err := e.dial(t, from, f, sctpWait)
			if err != nil {
				t.Errorf("connect, %s: %v", name, err)
				continue
			}
			e.associations = append(e.associations, sctpAssociation{name, fd})
			opened++
		}
	}
	e.talk(t, what)
	return opened
}

// wantNone wants that a process of the host has no Service.
func (e *sctpNode) wantNone(t *testing.T, from string) {
	t.Helper()
	for _, f := range e.fronts {
		if f.external {
			continue
		}
		if _, err := e.dial(t, from, f, time.Second); err == nil {
			t.Errorf("a process of %s reaches %s with eBPF", from, f.what)
		}
	}
}

// talk asks on all associations.
func (e *sctpNode) talk(t *testing.T, when string) {
	t.Helper()
	for _, a := range e.associations {
		if err := askSCTP(a.fd, when); err != nil {
			t.Errorf("%s: %s: %v", when, a.name, err)
		}
	}
}

func askSCTP(fd int, question string) error {
	if _, err := unix.Write(fd, []byte(question)); err != nil {
		return fmt.Errorf("ask: %w", err)
	}
	answer := make([]byte, len(question))
	for n := 0; n < len(answer); {
		size, err := unix.Read(fd, answer[n:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || size == 0 {
			return fmt.Errorf("read after %d bytes: %w", n, errors.Join(err, unix.ECONNRESET))
		}
		n += size
	}
	if string(answer) != question {
		return fmt.Errorf("answer %q, want %q", answer, question)
	}
	return nil
}

// tracked counts conntrack's entries of SCTP on node a.
func (e *sctpNode) tracked(t *testing.T) (n int) {
	t.Helper()
	e.Do(t, "a", func() error {
		table, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer table.Close()
		return table.Dump(t.Context(), conntrack.Filter{Protocol: unix.IPPROTO_SCTP}, func(*conntrack.Entry) bool { n++; return true })
	})
	return n
}

// wantEBPF waits for a number of flows of SCTP in the flow table of node a.
func (e *sctpNode) wantEBPF(t *testing.T, want int) {
	t.Helper()
	line := fmt.Sprintf("spillway_ebpf_flows{protocol=\"sctp\"} %d\n", want)
	await.True(t, fmt.Sprintf("%d flows of SCTP on node a", want), func() bool {
		text, err := e.Agent("a").Metrics(t.Context())
		return err == nil && strings.Contains(text, line)
	})
}
