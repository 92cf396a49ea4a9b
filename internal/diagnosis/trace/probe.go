package trace

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/diagnosis/drops/cause"
	"spillway.dev/spillway/internal/facts/model"
)

// Probe is one real connection, or one datagram, and where it got to.
type Probe struct {
	// Skipped says why there was none.
	Skipped string `json:"skipped,omitempty"`
	// Result is connected, answered, refused, unreachable, no answer or failed.
	Result string  `json:"result,omitempty"`
	Millis float64 `json:"milliseconds,omitempty"`
	// Remote is the address to which the kernel connected, after the socket hooks.
	Remote string `json:"remote,omitempty"`
	// Flow is the entry that appeared in the flow table.
	Flow *inspect.FlowEntry `json:"flow,omitempty"`
	// Counters are the verdicts that grew meanwhile, also by other packets of the node.
	Counters map[string]uint64 `json:"counters,omitempty"`
	Drops    []drops.Drop      `json:"drops,omitempty"`
	// Conclusion says where the packet got to.
	Conclusion string `json:"conclusion,omitempty"`
}

// failed reports that the connection got no answer.
func (p *Probe) failed() bool {
	return p.Skipped == "" && p.Result != "connected" && p.Result != "answered"
}

// mostDrops bounds the drops that are reported. dropsPatience is the wait for a drop that
// is reported late, and for a retransmission's. firstPatience is that for the first one of a
// connection that has failed: on a busy node, to read one takes longer.
const (
	mostDrops     = 4
	dropsPatience = 300 * time.Millisecond
	firstPatience = 2 * time.Second
)

// probe opens the connection and follows it.
func (t *tracer) probe(ctx context.Context) error {
	if !t.Connect {
		return nil
	}
	t.Probe = &Probe{}
	switch {
	case t.client.kind == outsideClient:
		t.Probe.Skipped = "the client is not on this node; to try the endpoint, trace from a pod of this node"
		return nil
	case t.client.kind == podClient && t.client.ns == nil:
		t.Probe.Skipped = "the pod's network namespace is not visible here"
		return nil
	}
	follower := t.follow()
	if follower != nil {
		defer follower.Close()
	}
	verdicts := cause.ReadVerdicts(t.BPFFS)
	var before map[string]uint64
	if t.view != nil {
		before = t.view.Verdicts()
	}
	if err := t.connect(); err != nil {
		t.Probe.Result, t.Probe.Conclusion = "failed", err.Error()
		return nil
	}
	if t.view != nil {
		t.observe(before)
	}
	if !t.serves {
		t.followTracked()
	}
	if follower != nil && t.Probe.failed() {
		t.collect(ctx, follower, verdicts)
	}
	t.concludeProbe()
	return nil
}

// follow starts to follow drops; nil if this kernel cannot.
func (t *tracer) follow() *drops.Follower {
	c := drops.Config{Protocol: uint8(t.Protocol), Ports: []uint16{t.SourcePort, t.Port}}
	for _, e := range t.Sets {
		if !slices.Contains(c.Ports, e.Addr.Port()) && len(c.Ports) < 8 {
			c.Ports = append(c.Ports, e.Addr.Port())
		}
	}
	f, err := drops.Follow(c)
	if err != nil {
		t.note("Drops are not followed: %v", err)
		return nil
	}
	return f
}

// connect opens the connection in a process of the client's, and waits for its result.
func (t *tracer) connect() error {
	p := t.Probe
	cgroup := ""
	if t.client.cgroup != "" {
		dir, err := newCgroup(t.client.cgroup)
		if err != nil {
			t.note("The probe runs outside of the client's cgroup, so no socket hook may see it: %v", err)
		} else {
			defer os.Remove(dir)
			cgroup = dir
		}
	}
	c, err := t.start(cgroup, t.request(t.SourcePort))
	if err != nil {
		return err
	}
	defer c.end()
	e, err := c.next()
	if err == nil && e.Errno == 0 {
		e, err = c.next()
	}
	if err != nil {
		return err
	}
	p.Millis = float64(e.Micros) / 1000
	if t.remote = t.reached(e.Remote); t.remote.IsValid() {
		p.Remote = t.remote.String()
	}
	switch errno := unix.Errno(e.Errno); {
	case e.Answered && t.Protocol == model.TCP:
		p.Result = "connected"
	case e.Answered:
		p.Result = "answered"
	case errno == unix.ECONNREFUSED:
		p.Result = "refused"
	case errno == unix.ETIMEDOUT:
		p.Result = "no answer"
	case errno == unix.EHOSTUNREACH || errno == unix.ENETUNREACH:
		p.Result = "unreachable"
	default:
		p.Result, p.Conclusion = "failed", errnoText(errno)
	}
	return nil
}

// reached returns the address to which the kernel connected, if it is known: a socket that
// is refused at once is no longer listed.
func (t *tracer) reached(listed netip.AddrPort) netip.AddrPort {
	switch {
	case listed.IsValid():
		return listed
	case !slices.Contains(t.Verdicts, "socket_translated"):
		return t.to()
	case len(t.Sets) == 1:
		return t.Sets[0].Addr
	}
	return netip.AddrPort{}
}

// observe reads what the connection left in the maps.
func (t *tracer) observe(before map[string]uint64) {
	p := t.Probe
	if t.remote.IsValid() {
		p.Flow = t.view.Flow(t.Protocol, t.from(), t.remote)
	}
	p.Counters = map[string]uint64{}
	for name, n := range t.view.Verdicts() {
		if n > before[name] && name != "pass_other" {
			p.Counters[name] = n - before[name]
		}
	}
}

// collect adds the drops of the connection's packets, and what dropped them.
func (t *tracer) collect(ctx context.Context, f *drops.Follower, verdicts *cause.Verdicts) {
	first := dropsPatience
	if t.Probe.failed() {
		first = firstPatience
	}
	t.Probe.Drops = readDrops(ctx, first, func(ctx context.Context) (drops.Drop, error) { return f.NextOf(ctx, t.concerns) })
	for i := range t.Probe.Drops {
		d := &t.Probe.Drops[i]
		verdicts.Explain(d)
		cause.ExplainDenial(f, d)
		d.Stack = nil
	}
}

// readDrops reads the drops that the kernel has reported, one of a kind. first is the wait for the
// first one.
func readDrops(ctx context.Context, first time.Duration, next func(context.Context) (drops.Drop, error)) (found []drops.Drop) {
	last := time.Now().Add(dropsPatience)
	within := func() (drops.Drop, error) {
		patience := dropsPatience
		if len(found) == 0 {
			patience = first
		}
		ctx, stop := context.WithTimeout(ctx, patience)
		defer stop()
		return next(ctx)
	}
	for len(found) < mostDrops {
		d, err := within()
		if err != nil || d.Time.After(last) {
			break
		}
		again := slices.ContainsFunc(found, func(x drops.Drop) bool {
			return x.Reason == d.Reason && x.Location == d.Location && x.Inode == d.Inode
		})
		if !again {
			found = append(found, d)
		}
	}
	return found
}

// concerns reports whether a dropped packet is the connection's: it has the client's port,
// or the port that took its place.
func (t *tracer) concerns(d *drops.Packet) bool {
	ports := []uint16{t.SourcePort}
	if f := t.Probe.Flow; f != nil {
		ports = append(ports, f.Src.Port())
	}
	ends := []netip.Addr{t.To.Addr, t.remote.Addr()}
	if f := t.Probe.Flow; f != nil {
		ends = append(ends, f.Dst.Addr())
	}
	request := slices.Contains(ports, d.SourcePort) && slices.Contains(ends, d.Destination)
	reply := slices.Contains(ports, d.DestinationPort) && slices.Contains(ends, d.Source)
	return request || reply
}

// concludeProbe says where the packet got to.
func (t *tracer) concludeProbe() {
	p := t.Probe
	if p.Conclusion != "" {
		return
	}
	at := "an endpoint"
	if t.remote.IsValid() {
		at = t.remote.String()
	}
	if p.Flow != nil {
		at = p.Flow.Dst.String()
	}
	switch {
	case !p.failed():
		p.Conclusion = fmt.Sprintf("%s in %.1f ms by %s", p.Result, p.Millis, at)
	case len(p.Drops) > 0:
		d := p.Drops[0]
		p.Conclusion = fmt.Sprintf("sent to %s, and dropped in %s%s (%s): %s", at, d.Namespace, hop(&d), d.Reason, d.Meaning)
	case t.Refused:
		p.Conclusion = "as the steps say: " + t.Decision
	case p.Result == "refused":
		p.Conclusion = fmt.Sprintf("%s refuses: nothing listens on the port there, or a firewall rejects", at)
	case p.Result == "unreachable":
		p.Conclusion = fmt.Sprintf("%s is unreachable: no route, or the address does not answer ARP", at)
	case p.Flow != nil && p.Flow.State != "new":
		p.Conclusion = fmt.Sprintf("%s answered (flow state %s), but the answer did not reach the client", at, p.Flow.State)
	case t.Protocol == model.UDP:
		p.Conclusion = fmt.Sprintf("the datagram went to %s, and no answer came in %v: the endpoint is dead, drops it, or does not answer "+
			"unknown requests", at, t.Timeout)
	default:
		p.Conclusion = fmt.Sprintf("the SYN went to %s, and no SYN-ACK came in %v: the endpoint is dead, or its node drops the packet", at,
			t.Timeout)
	}
	if p.failed() && p.Result != "refused" && len(p.Drops) == 0 && !t.Refused {
		t.neighborHint(at)
	}
}

// neighborHint adds what the neighbor table says of the silent endpoint.
func (t *tracer) neighborHint(at string) {
	to, err := netip.ParseAddrPort(at)
	if err != nil {
		return
	}
	_ = t.inside(func() error {
		if text, err := routeText(to.Addr()); err == nil {
			t.Probe.Conclusion += "; its next hop: " + text
		}
		return nil
	})
}
