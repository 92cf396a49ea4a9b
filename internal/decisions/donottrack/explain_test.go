package donottrack

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// kernel says what becomes of a packet by a State, as the rules of the policies' table
// do: four ways in which it may be about a target, one after the other.
func kernel(s State, own []netip.Addr, proto model.Protocol, src, dst netip.AddrPort) string {
	egress, out := false, AsUsual
	for target := range s.Targets {
		egress = egress || target.Side == Egress
	}
	for _, way := range []struct {
		side       Side
		here, peer netip.AddrPort
		port       uint16
	}{{Ingress, dst, src, dst.Port()}, {Ingress, src, dst, src.Port()}, {Egress, src, dst, dst.Port()}, {Egress, dst, src, src.Port()}} {
		for target, name := range s.Targets {
			if target.Side != way.side || target.Addr != way.here.Addr() || target.Protocol != proto || way.port < target.First ||
				target.Last < way.port {
				continue
			}
			v, peer := s.Verdicts[name], way.peer.Addr()
			matches := slices.ContainsFunc(v.Rules, func(name string) bool {
				r := s.Rules[name]
				return r.AnyPeer || s.Members[Member{name, peer}] ||
					slices.ContainsFunc(r.Blocks, func(b Range) bool { return b.First.Compare(peer) <= 0 && peer.Compare(b.Last) <= 0 })
			})
			switch {
			case matches && v.Track:
				out = strongest(out, Tracked)
			case matches:
				if out = Untracked; way.side == Ingress && way.here == dst && !egress {
					return out // accept
				}
			case v.Deny && !slices.Contains(own, peer):
				return Denied
			}
		}
	}
	return out
}

// TestExplainJudgesAsTheKernelDoes asks about every flow of random worlds, from each
// port and from all of them.
func TestExplainJudgesAsTheKernelDoes(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("10.0.0.6"), netip.MustParseAddr("fd00::6")}
	var all []netip.Addr
	for a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1"); len(all) < 14; a, b = a.Next(), b.Next() {
		all = append(all, a, b)
	}
	seen := map[string]int{}
	for seed := range uint64(60) {
		d := dice{rand.New(rand.NewPCG(seed, 2))}
		tr := New(Config{NodeName: "here", Netfilter: d.IntN(2) == 0})
		tr.SetNodeAddrs(own)
		for range 40 {
			tr.Apply(d.change())
		}
		for _, from := range all {
			for _, to := range all {
				for _, proto := range []model.Protocol{model.TCP, model.UDP} {
					for port := uint16(1); port < 8; port++ {
						if from.Is4() != to.Is4() || from == to {
							continue
						}
						f := Flow{From: from, To: to, Protocol: proto, Port: port, Source: PortSpan{1, 7}}
						whole := ""
						for source := uint16(1); source < 8; source++ {
							one := f
							one.Source = PortSpan{source, source}
							want := kernel(tr.State(), own, proto, netip.AddrPortFrom(from, source), netip.AddrPortFrom(to, port))
							if got := Outcome(one, tr.Explain(one)); got != want {
								t.Fatalf("seed %d, %v: explained as %q, and the kernel has it %q: %+v", seed, one, got, want, tr.Explain(one))
							}
							if seen[want]++; whole != "" && whole != want {
								want = DiffersBySource
							}
							whole = want
						}
						if got := Outcome(f, tr.Explain(f)); got != whole {
							t.Fatalf("seed %d, %v: from all ports explained as %q, want %q", seed, f, got, whole)
						}
						seen[whole]++
					}
				}
			}
		}
	}
	for _, outcome := range []string{Untracked, Tracked, Denied, AsUsual, DiffersBySource} {
		if seen[outcome] < 100 {
			t.Errorf("%q came %d times: the worlds are too dull", outcome, seen[outcome])
		}
	}
}
