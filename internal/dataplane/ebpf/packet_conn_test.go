package ebpf

import (
	"net/netip"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"testing"
)

// The first sequence numbers of the two ends; the client's wrap around soon.
const (
	clientISN = 0xfffffffd
	serverISN = 0x50000000
)

// conn is an honest TCP connection through a Service: both ends count their bytes.
type conn struct {
	n                           *packetNode
	client, front, server, seen netip.AddrPort // seen: the client as the endpoint sees it
	in, out                     at             // where the client's packets come in, and the endpoint's
	sent, answered              uint32         // what the client and the endpoint send next
}

// open makes a connection of a client's port to the endpoint on the other node.
func (n *packetNode) open(t testing.TB, p *plan, port uint16) *conn {
	t.Helper()
	return n.openTo(t, ap(p.client, port), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
}

// openHere makes one to the endpoint in pod1.
func (n *packetNode) openHere(t testing.TB, p *plan, port uint16) *conn {
	t.Helper()
	return n.openTo(t, ap(p.client, port), ap(p.clusterIP, 80), ap(p.pod1, 8080), inPod1)
}

func (n *packetNode) openTo(t testing.TB, client, front, server netip.AddrPort, out at) *conn {
	t.Helper()
	c := n.newConn(client, front, server, out)
	c.handshake(t)
	return c
}

// newConn makes a connection that is still to be opened.
func (n *packetNode) newConn(client, front, server netip.AddrPort, out at) *conn {
	return &conn{n: n, client: client, front: front, server: server, in: inEth0, out: out, sent: clientISN, answered: serverISN}
}

func (c *conn) handshake(t testing.TB) {
	t.Helper()
	c.syn(t)
	c.say(t, "<S.")
	c.say(t, ".")
}

// syn sends the first packet and learns what the endpoint sees.
func (c *conn) syn(t testing.TB) result {
	t.Helper()
	r := c.say(t, "S")
	if r.v != nil {
		c.seen = r.v.src
	}
	return r
}

// synUntilCreated repeats the first packet, as a client does, until it creates a flow: the
// programs try random ports, and can miss the last free one.
func (c *conn) synUntilCreated(t testing.TB) {
	t.Helper()
	for range 20 {
		if c.syn(t).verdicts[objects.TCVerdictFLOW_CREATED] == 1 {
			return
		}
	}
	t.Fatalf("20 SYNs from %s created no flow", c.client)
}

// say sends the next packet of an end: flags as tcpdump writes them, the endpoint's
// behind "<".
func (c *conn) say(t testing.TB, flags string, payload ...byte) result {
	t.Helper()
	hook, f := c.frame(flags, payload)
	r := c.n.send(t, hook, f)
	c.count(f, hook == c.out)
	return r
}

// count moves on by what a frame takes of the sequence numbers.
func (c *conn) count(f frame, byServer bool) {
	size := uint32(len(f.payload))
	for _, flag := range f.flags {
		if flag == 'S' || flag == 'F' {
			size++
		}
	}
	if byServer {
		c.answered += size
	} else {
		c.sent += size
	}
}

// frame is the next packet of an end, for a caller that changes it.
func (c *conn) frame(flags string, payload []byte) (at, frame) {
	if flags[0] == '<' {
		return c.out, frame{proto: protoTCP, src: c.server, dst: c.seen, flags: flags[1:], seq: c.answered, ack: c.sent, payload: payload}
	}
	f := frame{proto: protoTCP, src: c.client, dst: c.front, flags: flags, seq: c.sent, ack: c.answered, payload: payload}
	if flags == "S" {
		f.ack = 0
	}
	return c.in, f
}

// forge sends a packet with these numbers as if it were an end's.
func (c *conn) forge(t testing.TB, flags string, seq, ack uint32, payload ...byte) result {
	t.Helper()
	hook, f := c.frame(flags, payload)
	f.seq, f.ack = seq, ack
	return c.n.send(t, hook, f)
}

// talk sends packets one after the other.
func (c *conn) talk(t testing.TB, packets ...string) {
	t.Helper()
	for _, flags := range packets {
		c.say(t, flags)
	}
}

// lives fails unless both ends still reach each other.
func (c *conn) lives(t *testing.T) {
	t.Helper()
	for range 2 {
		c.say(t, "P.", 'q').wantPath(t, c.seen, c.server)
		c.say(t, "<P.", 'a').wantPath(t, c.front, c.client)
	}
}

// keys are those of both entries.
func (c *conn) keys() []objects.TCTuple {
	return []objects.TCTuple{tupleOf(protoTCP, c.client, c.front), tupleOf(protoTCP, c.server, c.seen)}
}

func (c *conn) wantState(t *testing.T, state objects.TCFlowState) {
	t.Helper()
	c.n.wantState(t, state, c.keys()...)
}
