package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// transfer is a read by hand, block by block, of a client outside: between two
// blocks things may happen.
type transfer struct {
	conn   net.PacketConn
	server netip.AddrPort // asked
	tid    netip.AddrPort // answers from here
	got    []byte
	next   uint16 // the block that is to come
	done   bool
	late   bool // an answer to an earlier request from this port may come
}

// socket opens a UDP socket on a host that no hook sees.
func (h *files) socket(t *testing.T, host string) net.PacketConn {
	t.Helper()
	machine, err := h.Host(host)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := machine.ListenPacket(t.Context(), "udp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func send(conn net.PacketConn, to netip.AddrPort, b []byte) error {
	_, err := conn.WriteTo(b, net.UDPAddrFromAddrPort(to))
	return err
}

func request(name string) []byte { return []byte("\x00\x01" + name + "\x00octet\x00") }

// begin asks for a file and waits for its first block.
func begin(conn net.PacketConn, server netip.AddrPort, name string) (*transfer, error) {
	x := &transfer{conn: conn, server: server, next: 1}
	if err := send(conn, server, request(name)); err != nil {
		return nil, err
	}
	return x, x.receive()
}

// receive waits for the next block, and acknowledges the last one again while it
// does not come, as clients do.
func (x *transfer) receive() error {
	buf := make([]byte, 600)
	for range 20 {
		_ = x.conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		n, from, err := x.conn.ReadFrom(buf)
		if err != nil {
			var late net.Error
			if !errors.As(err, &late) || !late.Timeout() {
				return err
			}
			if x.tid.IsValid() {
				_ = x.ack()
			}
			continue
		}
		a := from.(*net.UDPAddr).AddrPort()
		a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
		if x.tid.IsValid() && a.Addr() == x.tid.Addr() && a != x.tid && x.late {
			continue // RFC 1350, 4: discarded
		}
		if x.tid.IsValid() && a != x.tid {
			return fmt.Errorf("a datagram from %s in a transfer with %s", a, x.tid)
		}
		if a.Addr() != x.server.Addr() {
			return fmt.Errorf("%s answers what %s was asked", a, x.server)
		}
		if n < 4 || buf[1] != 3 {
			return fmt.Errorf("%s says %q", a, buf[:n])
		}
		if block := binary.BigEndian.Uint16(buf[2:]); block != x.next {
			continue // again
		}
		x.tid, x.next = a, x.next+1
		x.got = append(x.got, buf[4:n]...)
		x.done = n < 516
		return nil
	}
	return fmt.Errorf("block %d does not come", x.next)
}

func (x *transfer) ack() error {
	return send(x.conn, x.tid, []byte{0, 4, byte((x.next - 1) >> 8), byte(x.next - 1)})
}

// step acknowledges a block and waits for the next.
func (x *transfer) step() error {
	if err := x.ack(); err != nil {
		return err
	}
	return x.receive()
}

// finish gets the rest, which must be the file.
func (x *transfer) finish(t *testing.T, when, name string, size int) {
	t.Helper()
	for !x.done {
		if err := x.step(); err != nil {
			t.Errorf("%s, after %d bytes: %v", when, len(x.got), err)
			return
		}
	}
	_ = x.ack()
	if !bytes.Equal(x.got, content(name, size)) {
		t.Errorf("%s: %d bytes arrived, which are not those that were sent", when, len(x.got))
	}
}

func (h *files) begin(t *testing.T, host string, server netip.AddrPort, name string) *transfer {
	t.Helper()
	x, err := begin(h.socket(t, host), server, name)
	if err != nil {
		t.Fatalf("read %s from %s: %v", name, server, err)
	}
	return x
}

// drops are packets that the eBPF programs of a node have dropped.
func (h *files) drops(t *testing.T, node string) string {
	t.Helper()
	text, err := h.Agent(node).Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "spillway_ebpf_drops_total{") && !strings.HasSuffix(line, " 0\n") {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return strings.Join(out, ", ")
}
