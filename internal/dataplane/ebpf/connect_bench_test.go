package ebpf

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// connectCase is a column of BenchmarkConnect.
type connectCase struct {
	name    string
	change  func(*Config) // nil: no hooks
	balance intent.Balance
	// unfollowed leaves out the program sock_ops, and what the hooks do for it.
	unfollowed bool
	cgroup     string
	*packetNode
	to netip.AddrPort
	ns [2][]float64 // of a call, UDP and TCP, by round
}

// BenchmarkConnect reports what socket hooks add to connect(), in ns, as a table:
//
//	go test ./internal/dataplane/ebpf -run '^$' -bench Connect -benchtime 20x -v
//
// UDP is connect() of one socket again and again. TCP is a connection over loopback, from
// socket() to close(). Each iteration measures every case, in every other one in the reverse
// order. One case stands twice (A/A): the difference is the error of the table.
func BenchmarkConnect(b *testing.B) {
	p := plans["IPv4"]
	cases := []*connectCase{
		{name: "no socket hooks, the endpoint's address"},
		{name: "without counts of handshakes", change: func(*Config) {}, unfollowed: true},
		{name: "defaults", change: func(*Config) {}},
		{name: "the same again (A/A)", change: func(*Config) {}},
		{name: "--end-sockets", change: func(c *Config) { c.EndSockets = true }},
		{name: "--service-metrics all", change: func(c *Config) { c.ServiceMetrics = true }},
		{name: "--balance-by-load, random", change: func(c *Config) { c.BalanceByLoad = true }},
		{name: "--balance-by-load, least", change: func(c *Config) { c.BalanceByLoad = true }, balance: intent.LeastConnections},
		{name: "--flow-events all", change: func(c *Config) { c.FlowEvents = EventsAll }},
	}
	before := ownCgroup(b)
	for i, c := range cases {
		c.cgroup, c.to = before, ap(p.eth0, 8080)
		var changes []func(*Config)
		if c.change != nil {
			changes = append(changes, c.change)
		}
		restore := func() {}
		if c.unfollowed {
			restore = withoutSockOps()
		}
		c.packetNode = newNode(b, ebpf.SchedCLS, changes...)
		restore()
		hooks := c.attachSockets(b, fmt.Sprint("connect-", i))
		if c.change != nil {
			ports := both(p, 8080)
			for i := range ports {
				ports[i].Balance = c.balance
			}
			c.serve(b, ports...)
			c.cgroup, c.to = hooks, ap(p.clusterIP, 80)
		}
		c.listen(b, ap(p.eth0, 8080))
	}
	b.Cleanup(func() { join(b, before) }) // before the cgroups are removed, which must be empty
	for round := 0; b.Loop(); round++ {
		order := slices.Clone(cases)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, c := range order {
			join(b, c.cgroup)
			c.ns[0] = append(c.ns[0], c.connectUDP(b))
			c.ns[1] = append(c.ns[1], c.connectTCP(b))
		}
	}
	b.ReportMetric(0, "ns/op")
	var table strings.Builder
	for _, c := range cases {
		fmt.Fprintf(&table, "%-42s %8.0f %8.0f %8.0f %8.0f\n", c.name, slices.Min(c.ns[0]), median(c.ns[0]), slices.Min(c.ns[1]), median(c.ns[1]))
	}
	b.Logf("ns a call, minimum and median of the rounds\n%-42s %8s %8s %8s %8s\n%s", "", "UDP min", "median", "TCP min",
		"median", table.String())
}

// withoutSockOps has nodes follow no TCP socket, until restore is called.
func withoutSockOps() (restore func()) {
	was := objects.NewCollection
	objects.NewCollection = func(spec *ebpf.CollectionSpec, opts ebpf.CollectionOptions) (*ebpf.Collection, error) {
		spec = spec.Copy()
		delete(spec.Programs, objects.SockProgSockOps)
		if v := spec.Variables[objects.SockVarFollowTcpSockets]; v != nil {
			if err := v.Set(uint8(0)); err != nil {
				return nil, err
			}
		}
		return was(spec, opts)
	}
	return func() { objects.NewCollection = was }
}

func median(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	if len(sorted) == 0 {
		return math.NaN()
	}
	return sorted[len(sorted)/2]
}

// listen accepts connections at an address of the node until the benchmark ends.
func (c *connectCase) listen(b *testing.B, at netip.AddrPort) {
	b.Helper()
	fd := c.open(b, unix.SOCK_STREAM)
	must.Do(b, errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, sockaddr(at)), unix.Listen(fd, 1024)))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			if errors.Is(err, unix.ECONNABORTED) {
				continue // the client has closed it
			}
			if err != nil {
				return
			}
			unix.Close(conn)
		}
	}()
	b.Cleanup(func() { must.Do(b, unix.Shutdown(fd, unix.SHUT_RD)); <-done; unix.Close(fd) })
}

func (c *connectCase) open(b *testing.B, typ int) (fd int) {
	c.onThread(b, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC, 0)
		return err
	})
	return fd
}

func (c *connectCase) connectUDP(b *testing.B) (ns float64) {
	const calls = 20_000
	fd, to := c.open(b, unix.SOCK_DGRAM), sockaddr(c.to)
	defer unix.Close(fd)
	began := time.Now()
	for range calls {
		if err := unix.Connect(fd, to); err != nil {
			b.Fatal(err)
		}
	}
	return float64(time.Since(began).Nanoseconds()) / calls
}

// connectTCP ends each connection by an RST, so that no port remains in TIME-WAIT.
func (c *connectCase) connectTCP(b *testing.B) (ns float64) {
	const calls = 1000
	to := sockaddr(c.to)
	c.onThread(b, func() error {
		began := time.Now()
		for range calls {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
				unix.Connect(fd, to), unix.Close(fd))
			if err != nil {
				return err
			}
		}
		ns = float64(time.Since(began).Nanoseconds()) / calls
		return nil
	})
	return ns
}
