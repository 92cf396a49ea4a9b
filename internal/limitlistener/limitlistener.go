// Package limitlistener limits the open connections of a server, so that a client that opens
// many neither uses up the memory of the process nor keeps other clients out. A new connection
// is always accepted. If it is one too many, another one is closed: of the address that has
// the most, the oldest. So a client has the time in which as many others connect as may be open,
// whatever those do: a connection that is used often is no younger.
//
// golang.org/x/net/netutil.LimitListener lets new connections wait instead. A client that
// opens all that are allowed, and sends nothing, then delays every other client.
package limitlistener

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
)

// Limits are the most connections that may be open.
type Limits struct {
	Remote     int // from other machines
	PerAddress int // of those, from one IPv4 address or one IPv6 network of 64 bits
	// Local is a reserve for this machine: loopback, Unix sockets, and connections from the
	// address that they lead to, as those of the kubelet. No other machine completes a
	// handshake from such an address.
	Local int
	// KeepRequests closes connections that have a request last; it needs State. Where anyone can send a request,
	// it would help an attacker: who holds all others by slow requests leaves only the new
	// connections of other clients to close.
	KeepRequests bool
}

// Limiter limits the connections of one server, or of several together. Any goroutine may
// call its methods.
type Limiter struct {
	limits Limits

	mu   sync.Mutex
	open []*conn // the oldest first
}

// New returns a Limiter without connections.
func New(l Limits) *Limiter { return &Limiter{limits: l} }

// Listener returns a listener whose connections count.
func (l *Limiter) Listener(inner net.Listener) net.Listener { return &listener{inner, l} }

// State is for the field ConnState of http.Server: it tells which connections have a request,
// for KeepRequests.
func (l *Limiter) State(c net.Conn, state http.ConnState) {
	if secure, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = secure.NetConn()
	}
	if own, ok := c.(*conn); ok {
		l.mu.Lock()
		defer l.mu.Unlock()
		own.serves = state == http.StateActive
	}
}

// add counts a connection, and returns the one to close for it; nil: none.
func (l *Limiter) add(c *conn) *conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	same, class := 0, 0
	counts := map[source]int{}
	for _, other := range l.open {
		counts[other.source]++
		if other.source == c.source {
			same++
		}
		if other.source.local == c.source.local {
			class++
		}
	}
	var replaced *conn
	switch {
	case !c.source.local && same >= l.limits.PerAddress:
		replaced = l.choose(func(s source) bool { return s == c.source }, counts)
	case c.source.local && class >= l.limits.Local, !c.source.local && class >= l.limits.Remote:
		replaced = l.choose(func(s source) bool { return s.local == c.source.local }, counts)
	}
	l.open = append(l.open, c)
	return replaced
}

// choose removes a connection of the sources that may be and returns it.
func (l *Limiter) choose(may func(source) bool, counts map[source]int) *conn {
	best := -1
	for i, c := range l.open {
		if !may(c.source) {
			continue
		}
		if best < 0 || worse(c, l.open[best], counts, l.limits.KeepRequests) {
			best = i
		}
	}
	if best < 0 {
		return nil
	}
	c := l.open[best]
	l.open = slices.Delete(l.open, best, best+1)
	return c
}

// worse reports whether a is closed rather than b, which is before it in the list.
func worse(a, b *conn, counts map[source]int, keep bool) bool {
	if keep && a.serves != b.serves {
		return b.serves
	}
	return counts[a.source] > counts[b.source]
}

func (l *Limiter) remove(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = slices.DeleteFunc(l.open, func(other *conn) bool { return other == c })
}

// source is where connections come from that count together.
type source struct {
	local bool
	net   netip.Prefix // of remote ones
}

// sourceOf returns the source of a connection.
func sourceOf(c net.Conn) source {
	remote, ok := address(c.RemoteAddr())
	if !ok {
		return source{local: true} // a Unix socket
	}
	if own, ok := address(c.LocalAddr()); remote.IsLoopback() || ok && own == remote {
		return source{local: true}
	}
	bits := remote.BitLen()
	if remote.Is6() {
		bits = 64
	}
	network, _ := remote.Prefix(bits) // an address has as many bits
	return source{net: network}
}

func address(a net.Addr) (netip.Addr, bool) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}, false
	}
	addr, ok := netip.AddrFromSlice(tcp.IP)
	return addr.Unmap(), ok
}

type listener struct {
	net.Listener
	limiter *Limiter
}

// Accept returns the next connection.
func (l *listener) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: inner, limiter: l.limiter, source: sourceOf(inner)}
	if replaced := l.limiter.add(c); replaced != nil {
		replaced.reset()
	}
	return c, nil
}

// conn is a connection that counts until it is closed. The limiter's lock guards serves.
type conn struct {
	net.Conn
	limiter *Limiter
	source  source
	serves  bool // has a request
}

// Close closes the connection, which no longer counts.
func (c *conn) Close() error {
	c.limiter.remove(c)
	return c.Conn.Close()
}

// CloseWrite ends one direction; http.Server does so before it closes a connection whose
// client still sends.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// reset closes a connection that was replaced. The kernel keeps nothing of it.
func (c *conn) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Conn.Close() // its server sees the error
}
