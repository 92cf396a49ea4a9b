package workload

import (
	"context"
	"errors"
	"net"

	"golang.org/x/net/dns/dnsmessage"
)

// ServeDNS answers each question for an A or an AAAA record with an address from
// the ranges of the documentation.
func ServeDNS(ctx context.Context, c Config) error {
	conns, err := listenAll(c.Listen, func(e endpoint) (*net.UDPConn, error) { return listenUDP(ctx, e) })
	if err != nil {
		return err
	}
	return serveAll(ctx, c, conns, answerQuestions)
}

func answerQuestions(conn *net.UDPConn) error {
	buf, oob := make([]byte, maxDatagram), make([]byte, 128)
	for {
		n, oobn, _, from, err := conn.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil || from.Port() <= lastPrivilegedPort {
			continue
		}
		if answer := answerQuestion(buf[:n]); answer != nil {
			_, _, _ = conn.WriteMsgUDPAddrPort(answer, answerFrom(oob[:oobn]), from) // lost, as any datagram may be
		}
	}
}

// answerQuestion returns nil for an invalid query.
func answerQuestion(question []byte) []byte {
	var m dnsmessage.Message
	if m.Unpack(question) != nil || m.Response || len(m.Questions) != 1 {
		return nil
	}
	m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
	q := m.Questions[0]
	header := dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 5}
	switch q.Type {
	case dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{{Header: header, Body: &dnsmessage.AResource{A: [4]byte{192, 0, 2, 1}}}}
	case dnsmessage.TypeAAAA:
		m.Answers = []dnsmessage.Resource{{Header: header, Body: &dnsmessage.AAAAResource{AAAA: [16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1}}}}
	default:
		m.RCode = dnsmessage.RCodeNotImplemented
	}
	answer, err := m.Pack()
	if err != nil {
		return nil
	}
	return answer
}
