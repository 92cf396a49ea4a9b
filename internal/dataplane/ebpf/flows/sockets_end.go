package flows

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Sockets that a connect hook has translated keep their endpoint. If the endpoint dies
// without a packet, they hang until TCP gives up, and UDP sockets for ever. With
// Config.EndSockets, the agent ends them. It always ends the node's own TCP sockets whose SYN has no
// answer: their processes can connect again at once. It identifies a socket by the record of the
// connect hook and by its cookie: an address alone may belong to another endpoint by now.

const (
	// endGrace is the time from the removal of an endpoint to the walk over all sockets. The
	// changes of one rollout share a walk, and an endpoint may move between Services.
	endGrace = 50 * time.Millisecond
	// endRetry is the time until another walk while the state of some port is unknown.
	endRetry = time.Second
	// endBatch sockets end at once, then the agent waits endPause: 50,000 in a second.
	endBatch = 500
	endPause = 10 * time.Millisecond
	// endPasses is the maximum number of sockets with equal addresses that one walk ends.
	endPasses = 16
	// endMax is the maximum number of sockets that one walk ends. Others wait for the next.
	endMax = 1 << 18
	// endReads bounds the system calls of a walk. One reads up to 64 KiB.
	endReads = 1 << 16
)

// endOutcome is what became of a socket to end.
type endOutcome int

const (
	endDone        endOutcome = iota
	endClosed                 // the process had closed it, or another socket has its addresses
	endUnreachable            // its network namespace cannot be entered
	endFailed
	endOutcomes
)

var endOutcomeNames = [endOutcomes]string{"ended", "closed", "unreachable", "failed"}

var socketsEndedDesc = prometheus.NewDesc("spillway_sockets_ended_total",
	"Connected sockets whose endpoint was removed, by outcome. Processes got an error for those that are ended. For unreachable ones, "+
		"the agent needs CAP_SYS_ADMIN and the host's /run/netns.", []string{"protocol", "outcome"}, nil)

// socketEnds ends sockets. A nil *socketEnds ends none.
type socketEnds struct {
	log        *slog.Logger
	sockets    *link.Iter              // of removed endpoints; nil without Config.EndSockets
	handshakes *link.Iter              // of the node's own sockets with removed endpoints
	here       *kernel.SocketDestroyer // of the agent's own network namespace
	netns      kernel.NetnsID
	wanted     chan struct{}
	warned     bool
	counts     [2][endOutcomes]atomic.Uint64 // TCP, UDP
}

// openSocketEnds returns nil, and logs the reason, if the kernel lacks support.
func (t *Table) openSocketEnds() *socketEnds {
	if t.cfg.SocketHooks == objects.HooksOff {
		return nil
	}
	e, err := newSocketEnds(t.objects, t.cfg.Log)
	if err != nil && t.cfg.EndSockets {
		t.cfg.Log.Warn("Sockets of removed endpoints are not ended", "reason", err)
	} else if err != nil {
		t.cfg.Log.Info("The node's own handshakes with removed endpoints are not ended", "reason", err)
	}
	return e
}

func newSocketEnds(o *objects.Objects, log *slog.Logger) (*socketEnds, error) {
	if o.Programs[objects.SockProgLostHandshakes] == nil {
		return nil, kernel.ProbeSocketIterators()
	}
	if err := kernel.ProbeSocketDestroy(); err != nil {
		return nil, err
	}
	e := &socketEnds{log: log, wanted: make(chan struct{}, 1)}
	var err error
	if e.netns, err = kernel.CurrentNetns(); err != nil {
		return nil, err
	}
	if e.here, err = kernel.OpenSocketDestroyer(); err != nil {
		return nil, err
	}
	e.sockets, err = attachIter(o, objects.SockProgLostSockets, objects.SockMapSocketBackends)
	if err == nil {
		e.handshakes, err = attachIter(o, objects.SockProgLostHandshakes, objects.SockMapConnections)
	}
	if err != nil {
		e.close()
		return nil, err
	}
	return e, nil
}

// attachIter returns nil if the program is not loaded.
func attachIter(o *objects.Objects, program, of string) (*link.Iter, error) {
	p := o.Programs[program]
	if p == nil {
		return nil, nil
	}
	i, err := link.AttachIter(link.IterOptions{Program: p, Map: o.Maps[of]})
	if err != nil {
		return nil, fmt.Errorf("attach iterator %s: %w", program, err)
	}
	return i, nil
}

func (e *socketEnds) close() {
	if e == nil {
		return
	}
	for _, i := range []*link.Iter{e.sockets, e.handshakes} {
		if i != nil {
			_ = i.Close()
		}
	}
	_ = e.here.Close()
}

// want requests a walk and does not wait for it.
func (e *socketEnds) want() {
	if e == nil {
		return
	}
	select {
	case e.wanted <- struct{}{}:
	default: // already requested
	}
}

// endLoop ends sockets of removed endpoints. Walks take a tenth of its time at most.
func (t *Table) endLoop(ctx context.Context) {
	if t.ends == nil {
		return
	}
	t.ends.want() // endpoints may have gone while no agent ran
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.ends.wanted:
		}
		sleep(ctx, endGrace)
		select {
		case <-t.ends.wanted: // the walk covers it
		default:
		}
		began := time.Now()
		known, err := t.EndSockets(ctx)
		if err != nil && ctx.Err() == nil {
			t.cfg.Log.Warn("End sockets of removed endpoints", "err", err)
		}
		if !known {
			sleep(ctx, endRetry)
			t.ends.want()
		}
		sleep(ctx, 9*time.Since(began))
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// EndSockets ends the node's sockets in a handshake with an endpoint that no Service has any more,
// and with Config.EndSockets all connected sockets of such an endpoint. known is false if another
// walk is necessary.
func (t *Table) EndSockets(ctx context.Context) (known bool, err error) {
	known, err = t.endListed(ctx, t.ends.handshakes, t.services.IfRemoved)
	if err != nil || t.ends.sockets == nil {
		return known, err
	}
	more, err := t.endListed(ctx, t.ends.sockets, t.services.IfGone)
	return known && more, err
}

// endListed ends the sockets that an iterator lists and whose endpoint is gone.
func (t *Table) endListed(ctx context.Context, list *link.Iter,
	lookup func(use func(gone func(objects.TCFrontendKey) bool)) (known bool)) (known bool, err error) {
	lost, all, err := listSockets(list)
	if err != nil || len(lost) == 0 {
		return true, err
	}
	known = lookup(func(gone func(objects.TCFrontendKey) bool) {
		lost = slices.DeleteFunc(lost, func(s objects.SockLostSocket) bool { return !gone(lostEndpoint(&s)) })
	})
	if !known || len(lost) == 0 {
		return known && all, nil
	}
	return all, t.ends.end(ctx, lost)
}

// lostEndpoint returns the endpoint of a socket.
func lostEndpoint(s *objects.SockLostSocket) objects.TCFrontendKey {
	key := objects.TCFrontendKey{Port: s.PeerPort, Proto: s.Proto, Family: s.Family}
	key.Addr.W = s.Peer.W
	return key
}

// listSockets returns the sockets that an iterator lists. all is false if there are more.
func listSockets(list *link.Iter) (lost []objects.SockLostSocket, all bool, err error) {
	r, err := list.Open()
	if err != nil {
		return nil, false, fmt.Errorf("walk over sockets: %w", err)
	}
	defer r.Close()
	var decode error
	all, err = eachRecord(r, binary.Size(objects.SockLostSocket{}), func(record []byte) bool {
		var s objects.SockLostSocket
		if _, decode = binary.Decode(record, binary.NativeEndian, &s); decode != nil {
			return false
		}
		lost = append(lost, s)
		return len(lost) < endMax
	})
	if err = errors.Join(err, decode); err != nil {
		return nil, false, err
	}
	return lost, all, nil
}

// end ends sockets, one network namespace after the other.
func (e *socketEnds) end(ctx context.Context, lost []objects.SockLostSocket) error {
	by := map[kernel.NetnsID][]objects.SockLostSocket{}
	for _, s := range lost {
		id := kernel.NetnsID{Cookie: s.NetnsCookie, Inode: uint64(s.NetnsInode)}
		by[id] = append(by[id], s)
	}
	r := &endRun{}
	for id, list := range by {
		d, err := e.destroyer(id)
		r.note(err)
		if d == nil {
			for i := range list {
				r.add(&list[i], endUnreachable)
			}
			continue
		}
		r.destroyAll(ctx, d, list)
		if d != e.here {
			_ = d.Close()
		}
	}
	for proto := range r.sum {
		for o, n := range r.sum[proto] {
			e.counts[proto][o].Add(uint64(n))
		}
	}
	e.report(r.sum)
	return errors.Join(r.errs...)
}

// endRun is the state while the sockets of one walk end.
type endRun struct {
	sum  [2][endOutcomes]int // TCP, UDP
	errs []error             // the first ones
	done int
}

func (r *endRun) add(s *objects.SockLostSocket, o endOutcome) {
	proto := 0
	if s.Proto == unix.IPPROTO_UDP {
		proto = 1
	}
	r.sum[proto][o]++
}

func (r *endRun) note(err error) {
	if err != nil && len(r.errs) < 8 {
		r.errs = append(r.errs, err)
	}
}

// destroyAll ends sockets of one namespace. UDP sockets with SO_REUSEADDR may have equal
// addresses. The kernel then finds one of them, and the others when that one has ended.
func (r *endRun) destroyAll(ctx context.Context, d *kernel.SocketDestroyer, list []objects.SockLostSocket) {
	for range endPasses {
		var missed []objects.SockLostSocket
		for i := range list {
			if ctx.Err() != nil {
				return
			}
			if r.done++; r.done%endBatch == 0 {
				sleep(ctx, endPause)
			}
			o, err := destroy(d, &list[i])
			r.note(err)
			if o == endClosed {
				missed = append(missed, list[i])
			} else {
				r.add(&list[i], o)
			}
		}
		none := len(missed) == len(list)
		if list = missed; none || len(list) == 0 {
			break
		}
	}
	for i := range list {
		r.add(&list[i], endClosed)
	}
}

// report logs what became of the sockets.
func (e *socketEnds) report(sum [2][endOutcomes]int) {
	if tcp, udp := sum[0][endDone], sum[1][endDone]; tcp+udp > 0 {
		e.log.Info("Sockets of removed endpoints have ended", "tcp", tcp, "udp", udp)
	}
	if n := sum[0][endUnreachable] + sum[1][endUnreachable]; n > 0 && !e.warned {
		e.warned = true
		e.log.Warn("Sockets of removed endpoints remain: their network namespaces cannot be entered: give the agent CAP_SYS_ADMIN without "+
			"--drop-capabilities, and the host's /run/netns or process ids", "sockets", n)
	}
}

// destroyer returns the SocketDestroyer of a network namespace; nil if the namespace cannot
// be entered.
func (e *socketEnds) destroyer(id kernel.NetnsID) (d *kernel.SocketDestroyer, err error) {
	if id.Cookie == e.netns.Cookie {
		return e.here, nil
	}
	path := kernel.FindNetns(id)
	if path == "" {
		return nil, nil
	}
	ns, err := kernel.OpenNetns(path)
	if err != nil {
		return nil, nil // it was deleted meanwhile
	}
	defer ns.Close()
	err = kernel.Do(ns, func() error {
		if cookie, err := kernel.NetnsCookie(); err != nil || cookie != id.Cookie {
			return err
		}
		d, err = kernel.OpenSocketDestroyer()
		return err
	})
	return d, err
}

func destroy(d *kernel.SocketDestroyer, s *objects.SockLostSocket) (endOutcome, error) {
	err := d.Destroy(kernel.Socket{
		Protocol: s.Proto, Ifindex: s.Ifindex, Cookie: s.Cookie,
		Local: lostAddr(s.Local.W, s.LocalPort, s.Family), Peer: lostAddr(s.Peer.W, s.PeerPort, s.Family),
	})
	switch {
	case err == nil:
		return endDone, nil
	case errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE):
		return endClosed, nil
	}
	return endFailed, err
}

func lostAddr(w [4]uint32, port uint16, family uint8) netip.AddrPort {
	var a objects.TCAddr
	a.W = w
	return netip.AddrPortFrom(objects.FromAddr(a, family), objects.ToPort(port))
}

// collect exports the counters.
func (e *socketEnds) collect(ch chan<- prometheus.Metric) {
	if e == nil {
		return
	}
	for i, p := range []model.Protocol{model.TCP, model.UDP} {
		for o := range endOutcomes {
			ch <- prometheus.MustNewConstMetric(socketsEndedDesc, prometheus.CounterValue, float64(e.counts[i][o].Load()),
				p.String(), endOutcomeNames[o])
		}
	}
}
