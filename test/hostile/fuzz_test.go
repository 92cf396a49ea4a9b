package hostile

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	fuzzTime = flag.Duration("fuzz-time", 20*time.Second, "time that random attackers get")
	fuzzSeed = flag.Uint64("fuzz-seed", 0, "seed of the random attackers (default: a new one, which is printed)")
)

// fuzzer plays random attackers against honest connections. The same seed
// chooses the same actions; addresses, ports and sequence numbers of honest
// connections differ from run to run.
type fuzzer struct {
	t       *testing.T
	e       *env
	r       *rand.Rand
	senders map[string]*sender
	victims []*connection
	crowd   *crowd
	history []string // the last actions
}

// action is one thing that an attacker does; it returns what it did.
type action func(*fuzzer) string

// actions are chosen with equal probability.
var actions = []action{
	(*fuzzer).floodOfSYNs,
	(*fuzzer).straySegments,
	(*fuzzer).segmentOfClient,
	(*fuzzer).segmentOfClient,
	(*fuzzer).segmentOfServer,
	(*fuzzer).segmentOfServer,
	(*fuzzer).resetThenSYN,
	(*fuzzer).errorAboutVictim,
	(*fuzzer).datagrams,
	(*fuzzer).damagedFrame,
	(*fuzzer).wholeConnections,
}

// fuzz runs random actions for a time. The honest connections are checked all
// the while.
func (e *env) fuzz(t *testing.T) {
	t.Run("Fuzz", func(t *testing.T) {
		e.forgetFlows(t)
		seed := *fuzzSeed
		if seed == 0 {
			seed = rand.Uint64()
		}
		t.Logf("run it again with -fuzz-seed %d", seed)
		f := &fuzzer{t: t, e: e, r: rand.New(rand.NewPCG(seed, 0)), senders: map[string]*sender{}}
		f.start()
		count := 0
		for end := time.Now().Add(*fuzzTime); time.Now().Before(end) && f.crowd.failed() == nil; count++ {
			did := actions[f.r.IntN(len(actions))](f)
			f.history = append(f.history[max(0, len(f.history)-19):], did)
			time.Sleep(time.Duration(f.r.IntN(10)) * time.Millisecond)
		}
		f.end(count)
	})
}

// victimsEach is how many honest connections each variant has.
const victimsEach = 3

func (f *fuzzer) start() {
	for _, host := range []string{outsider, "a1", "b1"} {
		f.senders[host] = f.e.sender(f.t, host)
	}
	f.crowd = &crowd{stop: make(chan struct{})}
	for _, v := range variants {
		dst := f.e.nodePort(f.t, v.place, "tcp", v)
		for range victimsEach {
			c := f.e.mustConnect(f.t, v, dst)
			f.victims = append(f.victims, c)
			f.crowd.repeat(time.Duration(20+f.r.IntN(200))*time.Millisecond, c.ask)
		}
		f.crowd.repeat(300*time.Millisecond, func() error { return f.e.probe(v, dst) })
	}
	for host := range f.senders {
		f.crowd.listen(f.e.capture(f.t, host, foreign), host)
	}
}

// foreign tells whether what an attacker's host receives is of a connection that
// is not its own.
func foreign(p packet) bool {
	if port := p.dst.Port(); p.proto == "tcp" && port >= 20000 && port < 21000 {
		return !answersAttacker(p)
	}
	return marked(honestMark)(p)
}

// listen fails if an attacker's host receives bytes of an honest connection.
func (c *crowd) listen(at *capture, host string) {
	c.repeat(100*time.Millisecond, func() error {
		for _, p := range at.packets() {
			return fmt.Errorf("the attacker on %s received a packet of another's connection: %s from %s to %s", host, p.proto, p.src, p.dst)
		}
		return nil
	})
}

func (f *fuzzer) end(count int) {
	f.crowd.end()
	if err := f.crowd.failed(); err != nil {
		f.t.Errorf("after %d actions: %v\nthe last actions:\n%s", count, err, strings.Join(f.history, "\n"))
		return
	}
	broken, err := askAll(f.victims)
	if broken > 0 {
		f.t.Errorf("after %d actions %d honest connections are broken, such as: %v", count, broken, err)
	}
	f.t.Logf("%d actions", count)
}

// attacker chooses a host that sends: most often the one on the LAN.
func (f *fuzzer) attacker() (string, *sender) {
	host := []string{outsider, outsider, "a1", "b1"}[f.r.IntN(4)]
	return host, f.senders[host]
}

func (f *fuzzer) variant() variant { return variants[f.r.IntN(len(variants))] }

// victim chooses an honest connection.
func (f *fuzzer) victim() (*connection, variant) {
	i := f.r.IntN(len(f.victims))
	return f.victims[i], variants[i/victimsEach]
}

// flags are a random set of TCP flags.
func (f *fuzzer) flags() string {
	return []string{"S", "SA", "A", "PA", "R", "RA", "F", "FA", "SR", "SF", "", "SFRPA"}[f.r.IntN(12)]
}

// isn is a sequence number by which what answers it is known.
func (f *fuzzer) isn() uint32 { return attackerISN + f.r.Uint32N(attackerISNs) }

func (f *fuzzer) floodOfSYNs() string {
	v, count, base := f.variant(), 1+f.r.IntN(500), f.r.IntN(60000)
	dst := f.e.nodePort(f.t, v.place, "tcp", v)
	f.senders[outsider].flood(f.t, count, func(i int) packet {
		return packet{src: stranger(v, (base+i)%65000), dst: dst, proto: "tcp", flags: "S", seq: f.isn()}
	})
	return fmt.Sprintf("%d SYNs to %s", count, v)
}

func (f *fuzzer) straySegments() string {
	v, flags, count, base := f.variant(), f.flags(), 1+f.r.IntN(200), f.r.IntN(60000)
	dst := f.e.nodePort(f.t, v.place, "tcp", v)
	f.senders[outsider].flood(f.t, count, func(i int) packet {
		return packet{src: stranger(v, (base+i)%65000), dst: dst, proto: "tcp", flags: flags, seq: f.isn(), ack: f.r.Uint32()}
	})
	return fmt.Sprintf("%d stray segments %q to %s", count, flags, v)
}

// segmentOfClient forges a segment of a victim. Its numbers are random: an attacker
// that sees no packet of the victim can only guess them.
func (f *fuzzer) segmentOfClient() string {
	c, v := f.victim()
	host, s := f.attacker()
	p := packet{
		src: c.local(), dst: c.remote(), proto: "tcp", flags: f.flags(), seq: f.isn(), ack: f.r.Uint32(),
		payload: make([]byte, f.r.IntN(100)), vlan: f.r.IntN(8) == 0,
	}
	s.send(f.t, p)
	return fmt.Sprintf("%s forges %q of a client of %s, tagged: %v", host, p.flags, v, p.vlan)
}

func (f *fuzzer) segmentOfServer() string {
	c, v := f.victim()
	host, s := f.attacker()
	p := packet{
		src: f.e.backend(v, endpointUp), dst: c.seenAs(), proto: "tcp", flags: f.flags(), seq: f.r.Uint32(), ack: f.r.Uint32(),
		payload: make([]byte, f.r.IntN(100)),
	}
	s.send(f.t, p)
	return fmt.Sprintf("%s forges %q of the endpoint of %s", host, p.flags, v)
}

func (f *fuzzer) resetThenSYN() string {
	c, v := f.victim()
	for _, flags := range []string{"R", "S"} {
		f.senders[outsider].send(f.t, packet{src: c.local(), dst: c.remote(), proto: "tcp", flags: flags, seq: f.isn()})
	}
	f.senders[outsider].flood(f.t, 20, func(int) packet {
		own := netip.AddrPortFrom(f.e.addr(outsider, v), uint16(20000+f.r.IntN(1000)))
		return packet{src: own, dst: c.remote(), proto: "tcp", flags: "S", seq: attackerISN}
	})
	return fmt.Sprintf("RST and SYN of a client of %s, then 20 SYNs", v)
}

// errorAboutVictim sends an ICMP error about a packet of a victim, with a number
// that is not in its window, and often to the wrong address.
func (f *fuzzer) errorAboutVictim() string {
	c, v := f.victim()
	quoted, err := packet{src: c.seenAs(), dst: f.e.backend(v, endpointUp), proto: "tcp", flags: "A", seq: f.r.Uint32()}.quote()
	if err != nil {
		f.t.Fatal(err)
	}
	to := c.seenAs().Addr()
	if f.r.IntN(2) == 0 {
		to = f.e.addr([]string{"a", "a0", "a/bridge", "b0", honest}[f.r.IntN(5)], v)
	}
	host, s := f.attacker()
	kinds := [][2]uint8{{3, 0}, {3, 1}, {3, 3}, {3, 4}, {11, 0}, {12, 0}}
	if v.v6 {
		kinds = [][2]uint8{{1, 0}, {1, 1}, {1, 4}, {2, 0}, {3, 0}, {4, 0}}
	}
	kind := kinds[f.r.IntN(len(kinds))]
	s.send(f.t, packet{src: stranger(v, 1), dst: netip.AddrPortFrom(to, 0), proto: "icmp", icmpType: kind[0],
		icmpCode: kind[1], quoted: quoted})
	return fmt.Sprintf("%s sends ICMP %v about a client of %s to %s", host, kind, v, to)
}

func (f *fuzzer) datagrams() string {
	v, count := f.variant(), 1+f.r.IntN(300)
	service := []string{v.place, "none", "late-" + v.place}[f.r.IntN(3)]
	dst := f.e.nodePort(f.t, service, "udp", v)
	host, s := f.attacker()
	s.flood(f.t, count, func(i int) packet {
		return packet{src: stranger(v, i), dst: dst, proto: "udp", payload: make([]byte, f.r.IntN(50))}
	})
	return fmt.Sprintf("%s sends %d datagrams to %s", host, count, service)
}

// damagedFrame changes bytes of a frame behind its Ethernet header, or cuts it.
func (f *fuzzer) damagedFrame() string {
	c, v := f.victim()
	host, s := f.attacker()
	frame, err := s.frame(packet{src: c.local(), dst: c.remote(), proto: "tcp", flags: f.flags(), seq: f.r.Uint32(), ack: f.r.Uint32()})
	if err != nil {
		f.t.Fatal(err)
	}
	frame = slices.Clone(frame)
	for range 1 + f.r.IntN(4) {
		frame[14+f.r.IntN(len(frame)-14)] = byte(f.r.Uint32())
	}
	if f.r.IntN(3) == 0 {
		frame = frame[:15+f.r.IntN(len(frame)-15)]
	}
	if err := s.sendFrame(frame); err != nil {
		f.t.Fatal(err)
	}
	return fmt.Sprintf("%s sends a damaged frame of a client of %s: %x", host, v, frame)
}

// wholeConnections opens real connections and resets them.
func (f *fuzzer) wholeConnections() string {
	v, count := f.variant(), 1+f.r.IntN(30)
	dst := f.e.nodePort(f.t, v.place, "tcp", v)
	host, err := f.e.Host(outsider)
	if err != nil {
		f.t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range count {
		wg.Go(func() {
			conn, err := host.Dial(f.t.Context(), "tcp", dst.String())
			if err != nil {
				return // the attacker may be refused
			}
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
		})
	}
	wg.Wait()
	return fmt.Sprintf("%d connections to %s", count, v)
}
