package probe

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// serve opens every listener of the request and answers on them until the
// process ends. An answer names the server, the client's address as it was
// seen, and the question.
func serve(req Request) error {
	for _, listen := range req.Listen {
		proto, addr, ok := strings.Cut(listen, " ")
		if !ok {
			return fmt.Errorf("read listen address %q: want \"tcp address:port\"", listen)
		}
		var err error
		switch proto {
		case "tcp":
			err = serveTCP(req.Server, addr)
		case "udp":
			err = serveUDP(req.Server, addr)
		default:
			err = fmt.Errorf("unknown protocol %q", proto)
		}
		if err != nil {
			return fmt.Errorf("listen on %s: %w", listen, err)
		}
	}
	return nil
}

func serveTCP(name, addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				time.Sleep(10 * time.Millisecond) // out of descriptors: wait for some to close
				continue
			}
			go answerLines(name, conn)
		}
	}()
	return nil
}

func answerLines(name string, conn net.Conn) {
	defer conn.Close()
	source := unmapped(conn.RemoteAddr())
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		if _, err := conn.Write(marshalReply(name, source, lines.Text())); err != nil {
			return
		}
	}
}

// serveUDP answers from the address that was asked, as a server that listens on
// every address must (it would otherwise answer from whatever the route says).
func serveUDP(name, addr string) error {
	pc, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	conn := pc.(*net.UDPConn)
	if err := ipv6.NewPacketConn(conn).SetControlMessage(ipv6.FlagDst, true); err != nil {
		return err
	}
	// Mapped IPv4 clients of an IPv6 socket come with an IPv4 control message.
	if err := ipv4.NewPacketConn(conn).SetControlMessage(ipv4.FlagDst, true); err != nil {
		return err
	}
	go answerDatagrams(name, conn)
	return nil
}

func answerDatagrams(name string, conn *net.UDPConn) {
	buf, oob := make([]byte, 4096), make([]byte, 512)
	for {
		n, oobn, _, from, err := conn.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		source := netip.AddrPortFrom(from.Addr().Unmap(), from.Port()).String()
		answer := marshalReply(name, source, strings.TrimSpace(string(buf[:n])))
		_, _, _ = conn.WriteMsgUDPAddrPort(answer, sourceControl(oob[:oobn]), from)
	}
}

// sourceControl builds the control message that makes an answer leave from the
// address the question was sent to.
func sourceControl(oob []byte) []byte {
	var v4 ipv4.ControlMessage
	if v4.Parse(oob) == nil && v4.Dst != nil {
		return (&ipv4.ControlMessage{Src: v4.Dst}).Marshal()
	}
	var v6 ipv6.ControlMessage
	if v6.Parse(oob) == nil && v6.Dst != nil && v6.Dst.To4() == nil {
		return (&ipv6.ControlMessage{Src: v6.Dst}).Marshal()
	}
	return nil
}

func marshalReply(name, source, echo string) []byte {
	b, err := json.Marshal(reply{Server: name, Source: source, Echo: echo})
	if err != nil {
		panic(err) // three strings always marshal
	}
	return append(b, '\n')
}

func unmapped(a net.Addr) string {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return a.String()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()).String()
}
