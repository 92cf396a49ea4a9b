package hostile

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/testbed/topology"
)

var floodScenarios = []scenario{
	{name: "SYNs from many forged sources", run: flooded(1, func(i int) (string, uint32) { return "S", uint32(i) })},
	{name: "Stray RSTs from many forged sources", run: flooded(2, func(i int) (string, uint32) { return "R", uint32(i) })},
	{name: "Stray ACKs from many forged sources", long: true, run: flooded(2, func(i int) (string, uint32) { return "A", uint32(i) })},
	{name: "Idle connections in a flood of half-open ones", run: idleInFlood, places: []string{"here"}},
	{name: "One source with many whole connections", run: oneSource(distant)},
	{name: "One source in the honest client's network with many whole connections", run: oneSource(outsiderAddr)},
	{name: "Closed connections give their ports back", run: closing},
}

// flooded sends enough segments of one kind to take every SNAT port, times
// factor, and then asks as new honest clients. The endpoint still has half-open
// connections from most of the ports: a client may have to repeat its SYN once.
func flooded(factor int, kind func(i int) (flags string, seq uint32)) func(*testing.T, *env, variant) {
	return func(t *testing.T, e *env, v variant) {
		dst := e.nodePort(t, v.place, "tcp", v)
		e.beside(t, v)
		e.sender(t, outsider).flood(t, factor*halfOpen*longer(), func(i int) packet {
			flags, seq := kind(i)
			return packet{src: stranger(v, i), dst: dst, proto: "tcp", flags: flags, seq: attackerISN + seq, ack: 1}
		})
		for range 20 {
			if err := e.probe(v, dst); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// idleInFlood: idle connections of one family, to both places, survive four
// times as many half-open ones as the flow table has entries.
func idleInFlood(t *testing.T, e *env, v variant) {
	const each = 250
	var idle []*connection
	attacker := e.sender(t, outsider)
	places := []variant{{v.v6, "here"}, {v.v6, "elsewhere"}}
	for _, place := range places {
		dst := e.nodePort(t, place.place, "tcp", place)
		for range each {
			idle = append(idle, e.mustConnect(t, place, dst))
		}
	}
	for _, place := range places {
		dst := e.nodePort(t, place.place, "tcp", place)
		attacker.flood(t, 2*flowEntries*longer(), func(i int) packet {
			return packet{src: stranger(v, i), dst: dst, proto: "tcp", flags: "S", seq: uint32(i)}
		})
	}
	if broken, err := askAll(idle); broken > 0 {
		t.Errorf("%d of %d idle connections broke, such as: %v", broken, len(idle), err)
	}
}

// askAll sends a request over every connection and counts the failures.
func askAll(connections []*connection) (broken int, first error) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, c := range connections {
		wg.Go(func() {
			if err := c.ask(); err != nil {
				mu.Lock()
				broken, first = broken+1, err
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return broken, first
}

// oneSource: one address opens as many real connections as there is room for,
// and leaves room for others.
func oneSource(source func(*env, variant) netip.Addr) func(*testing.T, *env, variant) {
	return func(t *testing.T, e *env, v variant) {
		dst := e.nodePort(t, v.place, "tcp", v)
		idle := []*connection{e.mustConnect(t, v, dst), e.mustConnect(t, v, dst)}
		held := e.hoard(t, source(e, v), dst, flowEntries/2)
		t.Logf("the attacker holds %d connections", held)
		for range 3 {
			if err := e.probe(v, dst); err != nil {
				t.Error(err)
				break
			}
		}
		if broken, err := askAll(idle); broken > 0 {
			t.Error(err)
		}
	}
}

func outsiderAddr(e *env, v variant) netip.Addr { return e.addr(outsider, v) }

// distant is an address of the outsider in a network that no honest client is in.
func distant(_ *env, v variant) netip.Addr {
	if v.v6 {
		return netip.MustParseAddr("2001:db8:7::7")
	}
	return netip.MustParseAddr("192.0.2.7")
}

// addDistantAddresses gives the outsider its distant addresses, and the nodes the
// routes to them.
func (e *env) addDistantAddresses(t *testing.T) {
	t.Helper()
	for _, v := range []variant{{v6: false}, {v6: true}} {
		addr := distant(e, v)
		e.Do(t, outsider, func() error { return changeAddress(addr, netlink.AddrAdd) })
		for _, node := range e.Nodes() {
			e.Output(t, node, "ip", "route", "replace", netip.PrefixFrom(addr, addr.BitLen()).String(), "dev", "eth0")
		}
	}
}

// hoard opens up to count connections from one address of the outsider and holds
// them until the test ends. Each of its workers ends after a failure.
func (e *env) hoard(t *testing.T, from netip.Addr, dst netip.AddrPort, count int) int {
	t.Helper()
	return e.hoardFrom(t, outsider, from, dst, count)
}

// hoardFrom is hoard of another host.
func (e *env) hoardFrom(t *testing.T, name string, from netip.Addr, dst netip.AddrPort, count int) int {
	t.Helper()
	host, err := e.Host(name)
	if err != nil {
		t.Fatal(err)
	}
	const workers = 8
	var wg sync.WaitGroup
	var mu sync.Mutex
	var held []net.Conn
	for range workers {
		wg.Go(func() {
			for range count / workers {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				conn, err := dialBound(ctx, host, from, dst)
				cancel()
				if err != nil {
					return
				}
				mu.Lock()
				held = append(held, conn)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, c := range held {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	})
	return len(held)
}

// dialBound connects from an address of a host.
func dialBound(ctx context.Context, host *topology.Host, from netip.Addr, dst netip.AddrPort) (conn net.Conn, err error) {
	err = host.Do(func() error {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
		conn, err = d.DialContext(ctx, "tcp", dst.String())
		return err
	})
	return conn, err
}

// closing is the control: connections that end by FIN or by RST soon leave
// their port to others, as often as there are ports.
func closing(t *testing.T, e *env, v variant) {
	dst := e.nodePort(t, v.place, "tcp", v)
	for _, reset := range []bool{false, true} {
		if err := e.visitMany(v, dst, 2*snatPorts*longer(), reset); err != nil {
			t.Errorf("connections that end with an RST (%v): %v", reset, err)
		}
	}
}

// visitMany opens and closes connections, 8 at once.
func (e *env) visitMany(v variant, dst netip.AddrPort, count int, reset bool) error {
	const workers = 8
	results := make(chan error, workers)
	for range workers {
		go func() {
			for range count / workers {
				c, err := e.connect(honest, v, dst)
				if err != nil {
					results <- err
					return
				}
				if reset {
					_ = c.Conn.(*net.TCPConn).SetLinger(0)
				}
				c.Close()
			}
			results <- nil
		}()
	}
	var err error
	for range workers {
		err = errors.Join(err, <-results)
	}
	return err
}
