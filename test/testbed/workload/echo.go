package workload

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// maxDatagram is the largest UDP payload.
const maxDatagram = 65535 - 8 - 20

// lastPrivilegedPort is that of a kernel whose ip_unprivileged_port_start is
// untouched.
const lastPrivilegedPort = 1023

// ServeUDP answers each datagram with "NAME CLIENT-ADDRESS:PORT PAYLOAD", from the
// address to which it was sent. To avoid endless exchanges it does not answer answers, or
// datagrams from a privileged port, where echo and chargen answer everything.
func ServeUDP(ctx context.Context, c Config) error {
	conns, err := listenAll(c.Listen, func(e endpoint) (*net.UDPConn, error) { return listenUDP(ctx, e) })
	if err != nil {
		return err
	}
	return serveAll(ctx, c, conns, func(conn *net.UDPConn) error { return answerDatagrams(conn, c.Name) })
}

// isAnswer knows an answer of ServeUDP by its second word, the client's address.
func isAnswer(datagram []byte) bool {
	name, rest, _ := bytes.Cut(datagram, []byte{' '})
	client, _, _ := bytes.Cut(rest, []byte{' '})
	_, err := netip.ParseAddrPort(string(client))
	return err == nil && nameRule.Match(name)
}

func answerDatagrams(conn *net.UDPConn, name string) error {
	buf, oob := make([]byte, maxDatagram), make([]byte, 128)
	answer := make([]byte, 0, maxDatagram)
	for {
		n, oobn, _, from, err := conn.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		if from.Port() <= lastPrivilegedPort || isAnswer(buf[:n]) {
			continue
		}
		answer = append(append(answer[:0], name...), ' ')
		answer = append(unmap(from).AppendTo(answer), ' ')
		answer = append(answer, buf[:n]...)
		answer = answer[:min(len(answer), maxDatagram)]
		// A client that has ended is no error of the server.
		_, _, _ = conn.WriteMsgUDPAddrPort(answer, answerFrom(oob[:oobn]), from)
	}
}

// answerFrom converts the packet information of a received datagram to that of its
// answer. The address stays. Routing chooses the interface; otherwise the kernel would
// insist on the interface of the datagram.
func answerFrom(oob []byte) []byte {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			info := unix.Inet4Pktinfo{Spec_dst: [4]byte(m.Data[8:12])} // the destination in the header
			return unix.PktInfo4(&info)
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			info := unix.Inet6Pktinfo{Addr: [16]byte(m.Data[:16])}
			return unix.PktInfo6(&info)
		}
	}
	return nil
}

// ServeTCP sends "NAME CLIENT-ADDRESS:PORT\n" on each connection and then echoes its
// input or, with Stream, sends numbered lines until the client ends.
func ServeTCP(ctx context.Context, c Config) error {
	listeners, err := listenAll(c.Listen, func(e endpoint) (net.Listener, error) {
		var lc net.ListenConfig
		return lc.Listen(ctx, e.network("tcp"), e.addr.String())
	})
	if err != nil {
		return err
	}
	return serveAll(ctx, c, listeners, func(l net.Listener) error {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			if err != nil {
				time.Sleep(10 * time.Millisecond) // out of files, most likely
				continue
			}
			go answerConn(ctx, c, conn.(*net.TCPConn))
		}
	})
}

func answerConn(ctx context.Context, c Config, conn *net.TCPConn) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	from := unmap(conn.RemoteAddr().(*net.TCPAddr).AddrPort())
	if _, err := fmt.Fprintf(conn, "%s %s\n", c.Name, from); err != nil {
		return
	}
	if !c.Stream {
		_, _ = io.Copy(conn, conn)
		return
	}
	interval := c.Interval
	if interval == 0 {
		interval = 10 * time.Millisecond
	}
	w := bufio.NewWriter(conn)
	for i := 1; ; i++ {
		fmt.Fprintln(w, i)
		if w.Flush() != nil {
			return
		}
		time.Sleep(interval)
	}
}

// serveAll runs a loop for each socket and returns when the context ends or one
// of the loops does.
func serveAll[T interface{ Close() error }](ctx context.Context, c Config, open []T, loop func(T) error) error {
	failed := make(chan error, len(open))
	for _, s := range open {
		go func() { failed <- loop(s) }()
	}
	defer closeAll(open)
	c.ready()
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
