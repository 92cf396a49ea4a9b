package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/ruleset"
	"spillway.dev/spillway/internal/page"
)

// snatPortsExhausted compares the ports in use towards one destination with the ports that
// a source NAT rule may choose from. The kernel counts a packet without a port as
// insert_failed, like a lost race: nf_nat gives up and leaves it a port that is in use
// (net/netfilter/nf_nat_core.c of Linux 6.18). So only the entries tell the two apart.
type snatPortsExhausted struct{}

func (snatPortsExhausted) Name() string  { return "SNAT ports" }
func (snatPortsExhausted) About() string { return "ports in use towards each destination" }

func (snatPortsExhausted) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		for _, p := range ns.scarcePorts() {
			out = append(out, portsFinding(n, ns, p))
		}
	}
	return out
}

func portsFinding(n *Node, ns *Namespace, p *SourcePorts) Finding {
	f := Finding{
		ID: "snat-ports-exhausted", Severity: Warning, Namespace: ns.Namespace.String(),
		Object: nodeObject(fmt.Sprintf("%s to %s", p.From, p.destination())),
		Title: fmt.Sprintf("new connections to %s may fail soon: %s of the SNAT ports are in use", p.destination(),
			percent(p.Used, p.Range.Size())),
		Evidence: []string{
			fmt.Sprintf("%d of %d ports (%s) in use from %s to %s", p.Used, p.Range.Size(), p.Range, p.From, p.destination()),
			"most by " + p.clients(),
			grew("insert_failed", ns.Counters.InsertFailed, ns.Grown.InsertFailed, n),
		},
		Numbers: map[string]float64{"used": float64(p.Used), "ports": float64(p.Range.Size()),
			"insert_failed": float64(ns.Counters.InsertFailed), "insert_failed_grown": float64(ns.Grown.InsertFailed)},
		Packets: "A new connection to this destination needs a source port that no other connection to it has. Without one, the kernel " +
			"drops its first packets (insert_failed). Other destinations are not concerned.",
		Remedy: "Open fewer connections to this destination: reuse them (keep-alive, a pool), or spread them over several addresses of the " +
			"destination or of this node. --random-fully does not help.",
	}
	if ns.exhausted(p) && minus(ns.Counters.InsertFailed, ns.Counters.ChainTooLong) > 0 {
		f.Severity = Critical
		f.Title = fmt.Sprintf("new connections to %s fail: %s of the SNAT ports are in use (SNAT port exhaustion)", p.destination(),
			percent(p.Used, p.Range.Size()))
	}
	p.addRemedies(&f, ns)
	return f
}

// addRemedies adds to a finding the ports that a shorter timeout frees, and the rules that
// choose the ports.
func (p *SourcePorts) addRemedies(f *Finding, ns *Namespace) {
	shorter := map[string]time.Duration{}
	for _, name := range slices.Sorted(maps.Keys(p.Silent)) {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s: %s of flows that were silent for more than %v; the timeout is %v", name,
			page.Counted(p.Silent[name], "port"), pauses[name], ns.Limits.Timeouts[name]))
		f.Numbers[name+"_silent"] = float64(p.Silent[name])
		if 4*p.Silent[name] >= p.Used {
			shorter[name] = pauses[name]
		}
	}
	for _, r := range ns.Rules.Rules {
		ports, ok := r.SourcePorts()
		if !ok || ports != p.Range || !r.OfFamily(p.From) {
			continue
		}
		f.Evidence = append(f.Evidence, r.Where()+": "+r.Text)
		if command := r.MakeAllPorts(); command != "" {
			f.Commands = append(f.Commands, ns.Namespace.EnterCommand()+command)
		}
	}
	if len(f.Commands) > 0 {
		f.Remedy = fmt.Sprintf("Let the rule use all %d ports (%s). Change it in the configuration of its owner too. --random-fully does "+
			"not help.", ruleset.AllPorts.Size(), ruleset.AllPorts)
	}
	if len(shorter) > 0 {
		f.Remedy += " Connections that have ended keep their port until the timeout: a shorter one frees it earlier."
		f.Commands = append(f.Commands, setTimeouts(ns.Namespace, shorter))
	}
}

// scarcePorts returns SourcePorts without rules of one port, while no packet fails: such a
// rule translates one flow by intention.
func (ns *Namespace) scarcePorts() []*SourcePorts {
	return slices.DeleteFunc(slices.Clone(ns.SourcePorts), func(p *SourcePorts) bool {
		return p.Range.Size() == 1 && ns.Grown.InsertFailed == 0
	})
}

// exhausted reports whether connections fail for lack of these ports. Ports may have become
// free between a failure and the reading of the table.
func (ns *Namespace) exhausted(p *SourcePorts) bool {
	return fullness(p.Used, p.Range.Size()) == Critical || minus(ns.Grown.InsertFailed, ns.Grown.ChainTooLong) > 0
}

// lacksPorts reports whether few ports of the rule are free towards a destination.
func (ns *Namespace) lacksPorts(r *ruleset.Rule) bool {
	ports, ok := r.SourcePorts()
	return ok && slices.ContainsFunc(ns.scarcePorts(), func(p *SourcePorts) bool {
		return p.Range == ports && r.OfFamily(p.From)
	})
}

// exhaustedPorts describes the destinations without a free port; "" if there is none.
func (ns *Namespace) exhaustedPorts() string {
	var list []string
	for _, p := range ns.scarcePorts() {
		if ns.exhausted(p) {
			list = append(list, fmt.Sprintf("%s (%d of %d ports in use)", p.destination(), p.Used, p.Range.Size()))
		}
	}
	return names(list)
}

// SourcePorts are the ports in use towards one destination, if they are close to all that
// a source NAT rule may choose from.
type SourcePorts struct {
	snatTuple
	Range   ruleset.PortRange
	Used    int
	Clients map[netip.Addr]int // ports by client
	Silent  map[string]int     // ports of flows that most likely have ended, by the name of the timeout
}

func (p *SourcePorts) destination() string {
	return conntrack.ProtocolName(p.Protocol) + " " + p.To.String()
}

// clients lists the sources with most entries.
func (p *SourcePorts) clients() string {
	const most = 3
	addrs := slices.SortedFunc(maps.Keys(p.Clients), func(a, b netip.Addr) int {
		return cmp.Or(cmp.Compare(p.Clients[b], p.Clients[a]), a.Compare(b))
	})
	var list []string
	for _, addr := range addrs[:min(most, len(addrs))] {
		list = append(list, fmt.Sprintf("%s (%d)", addr, p.Clients[addr]))
	}
	return strings.Join(list, ", ")
}

// snatTuple is the tuple of a reply without the port that source NAT chose. The kernel
// gives each of its ports to one connection.
type snatTuple struct {
	Protocol uint8
	Zone     uint16
	From     netip.Addr
	To       netip.AddrPort
}

// snatTupleOf returns the tuple and the port; ok is false for protocols without ports.
func snatTupleOf(e *conntrack.Entry) (t snatTuple, port uint16, ok bool) {
	switch e.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_UDPLITE, unix.IPPROTO_DCCP:
		t = snatTuple{e.Protocol, cmp.Or(e.Reply.Zone, e.Zone), e.Reply.Dst.Addr(), e.Reply.Src}
		return t, e.Reply.Dst.Port(), true
	}
	return t, 0, false
}

// maxTuples bounds the memory for a large table. A tuple with many entries is met long
// before as many others were.
const maxTuples = 200_000

// portCounter counts the ports in use by tuple.
type portCounter struct {
	ranges []ruleset.PortRange // of the rules; nothing is counted without one
	tuples map[snatTuple]*tuplePorts
}

type tuplePorts struct {
	translated int         // entries with another source than before
	used       []rangeUsed // of the ranges with a port in use
}

// rangeUsed counts the ports in use of one of portCounter.ranges.
type rangeUsed struct{ place, ports int32 }

func newPortCounter(rules *ruleset.Ruleset) *portCounter {
	c := &portCounter{tuples: map[snatTuple]*tuplePorts{}}
	for _, r := range rules.Rules {
		if ports, ok := r.SourcePorts(); ok && !slices.Contains(c.ranges, ports) {
			c.ranges = append(c.ranges, ports)
		}
	}
	return c
}

// count adds an entry. Those without a translation count too: a connection of the node
// itself has a port as well.
func (c *portCounter) count(e *conntrack.Entry) {
	if len(c.ranges) == 0 {
		return
	}
	tuple, port, ok := snatTupleOf(e)
	if !ok {
		return
	}
	t := c.tuples[tuple]
	if t == nil {
		if len(c.tuples) >= maxTuples {
			return
		}
		t = &tuplePorts{}
		c.tuples[tuple] = t
	}
	if e.Status&conntrack.SrcNAT != 0 {
		t.translated++
	}
	for i, r := range c.ranges {
		if r.Contains(port) {
			t.use(int32(i))
		}
	}
}

// use counts a port in use of a range. There may be many ranges, but few with a port.
func (t *tuplePorts) use(place int32) {
	i := slices.IndexFunc(t.used, func(u rangeUsed) bool { return u.place == place })
	if i < 0 {
		i = len(t.used)
		t.used = append(t.used, rangeUsed{place: place})
	}
	t.used[i].ports++
}

// scarce returns the tuples with few free ports, those with fewest first.
func (c *portCounter) scarce() []*SourcePorts {
	var out []*SourcePorts
	for tuple, t := range c.tuples {
		for _, u := range t.used {
			r := c.ranges[u.place]
			used := min(int(u.ports), r.Size())
			// Where most ports are outside of a range, another rule chose them.
			if t.translated == 0 || 2*used < t.translated || float64(used) < capacity.CloseToFull*float64(r.Size()) {
				continue
			}
			out = append(out, &SourcePorts{snatTuple: tuple, Range: r, Used: used, Clients: map[netip.Addr]int{}, Silent: map[string]int{}})
		}
	}
	slices.SortFunc(out, func(a, b *SourcePorts) int {
		return cmp.Or(cmp.Compare(a.Range.Size()-a.Used, b.Range.Size()-b.Used), a.To.Compare(b.To), a.From.Compare(b.From),
			cmp.Compare(a.Protocol, b.Protocol))
	})
	return out
}

// readSourcePorts adds clients and silence to the tuples with few free ports. It reads the table
// again only if there are such tuples.
func (ns *Namespace) readSourcePorts(ctx context.Context, c *conntrack.Conn, counter *portCounter) error {
	ns.SourcePorts = counter.scarce()
	if len(ns.SourcePorts) == 0 {
		return nil
	}
	return c.Dump(ctx, conntrack.Filter{}, func(e *conntrack.Entry) bool {
		tuple, port, _ := snatTupleOf(e)
		for _, p := range ns.SourcePorts {
			if p.snatTuple != tuple || !p.Range.Contains(port) {
				continue
			}
			p.Clients[e.Orig.Src.Addr()]++
			if name := e.TimeoutName(); ns.silent(name, e) {
				p.Silent[name]++
			}
		}
		return true
	})
}
