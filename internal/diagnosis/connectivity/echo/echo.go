// Package echo is a server for tests of connectivity over TCP and UDP. Its answer names the
// server and the client's address as the server saw it. The project's own tests
// and 'spillway connectivity test' share it.
package echo

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

// Reply is the answer to one question, as JSON on one line.
type Reply struct {
	Server string `json:"server"`
	Source string `json:"source"` // address and port of the client
	Echo   string `json:"echo"`   // the question
}

// Serve opens listeners such as "tcp [::]:8080" and answers on them, in the background, until
// the process ends. A question over TCP is a line, over UDP a datagram.
func Serve(name string, listeners ...string) error {
	for _, listen := range listeners {
		proto, addr, ok := strings.Cut(listen, " ")
		if !ok {
			return fmt.Errorf("read listen address %q: want \"tcp address:port\"", listen)
		}
		var err error
		switch proto {
		case "tcp":
			err = serveTCP(name, addr)
		case "udp":
			err = serveUDP(name, addr)
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
		if _, err := conn.Write(marshalReply(name, source, strings.TrimSpace(lines.Text()))); err != nil {
			return
		}
	}
}

// receiveBuffer, in bytes, has room for the questions of many clients while a busy machine
// does not run the server. Without room the kernel drops them, as if the path had lost them.
// It is limited by net.core.rmem_max.
const receiveBuffer = 8 << 20

// serveUDP answers from the address that was asked, as a server that listens on
// every address must (it would otherwise answer from whatever the route says).
func serveUDP(name, addr string) error {
	pc, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	conn := pc.(*net.UDPConn)
	if err := conn.SetReadBuffer(receiveBuffer); err != nil {
		return err
	}
	// Mapped IPv4 clients of an IPv6 socket come with an IPv4 control message. A kernel
	// without IPv6 has the second kind only.
	err6 := ipv6.NewPacketConn(conn).SetControlMessage(ipv6.FlagDst, true)
	if err := ipv4.NewPacketConn(conn).SetControlMessage(ipv4.FlagDst, true); err != nil {
		return errors.Join(err, err6)
	}
	go answerDatagrams(name, conn)
	return nil
}

func answerDatagrams(name string, conn *net.UDPConn) {
	buf, oob := make([]byte, 1<<16), make([]byte, 512)
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
	b, err := json.Marshal(Reply{Server: name, Source: source, Echo: echo})
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
