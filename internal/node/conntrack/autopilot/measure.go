package autopilot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
)

const (
	// sampleEntries bounds the entries that one measurement reads, over all namespaces.
	// The table is ordered by a hash, so the first entries of a dump are a random
	// sample. Its error is 1 or 2 %; four times as many entries cost 1 % of a busy
	// node's CPU.
	sampleEntries, leastSample = 5_000, 1_000
	// sampleAbove is the share of a table above which the ages of its entries are
	// sampled.
	sampleAbove = 1.0 / 16
)

// States of TCP entries with managed timeouts, enum tcp_conntrack.
const tcpFinWait, tcpTimeWait = 4, 7

// meter remembers the last measurement, for growth.
type meter struct {
	at      time.Time
	entries map[uint64]int
}

func newMeter() meter { return meter{entries: map[uint64]int{}} }

// measure reads every namespace, and samples the ages of entries of namespaces that are
// filling. It omits a namespace that vanishes meanwhile.
func (p *Pilot) measure(ctx context.Context, now time.Time) (measured, map[uint64]conntrack.Namespace, error) {
	m := measured{At: now}
	list, err := p.Namespaces()
	if errors.Is(err, os.ErrPermission) {
		err = nil // some process of a sandbox; top says so
	}
	errs := []error{err}
	found := map[uint64]conntrack.Namespace{}
	for _, n := range list {
		var s space
		err := n.Enter(func() (err error) {
			s, err = p.readUsage(ctx, n)
			if n.Own && err == nil {
				err = m.readSizes()
			}
			return err
		})
		switch {
		case err == nil:
			m.Spaces, found[s.Netns] = append(m.Spaces, s), n
			if n.Own {
				found[0] = n
			}
		case !errors.Is(err, os.ErrNotExist):
			errs = append(errs, fmt.Errorf("measure conntrack of %s: %w", n, err))
		}
	}
	if m.Max == 0 { // nothing is known without the own namespace
		m.Spaces = nil
	}
	p.grow(&m)
	errs = append(errs, p.look(ctx, &m, found))
	return m, found, errors.Join(errs...)
}

func (m *measured) readSizes() error {
	l, err := conntrack.ReadLimits()
	m.Max, m.Buckets, m.ExpectMax = l.Max, l.Buckets, l.ExpectMax
	return err
}

// readUsage reads the cheap values of the namespace.
func (p *Pilot) readUsage(ctx context.Context, n conntrack.Namespace) (s space, err error) {
	s.Name, s.Own = n.String(), n.Own
	if s.Netns, err = kernel.NetnsCookie(); err != nil {
		return s, err
	}
	if s.Entries, err = conntrack.ReadCount(); err != nil || s.Entries == 0 {
		return s, err
	}
	c, err := conntrack.Open()
	if err != nil {
		return s, err
	}
	defer c.Close()
	helpers, err := c.Expectations(ctx)
	for _, waiting := range helpers {
		s.Expectations += waiting
	}
	return s, err
}

// grow compares with the measurement before.
func (p *Pilot) grow(m *measured) {
	now := make(map[uint64]int, len(m.Spaces))
	for i := range m.Spaces {
		s := &m.Spaces[i]
		now[s.Netns] = s.Entries
		if before, known := p.meter.entries[s.Netns]; known && m.At.After(p.meter.at) {
			s.Growth = float64(s.Entries-before) / m.At.Sub(p.meter.at).Seconds()
		}
	}
	p.meter = meter{at: m.At, entries: now}
}

// look reads timeouts and ages where they matter: in namespaces that fill, and
// in those where something was changed.
func (p *Pilot) look(ctx context.Context, m *measured, found map[uint64]conntrack.Namespace) error {
	above := sampleAbove * float64(min(m.Max, capacity.TableWithin(p.Memory)))
	var matter []*space
	for i := range m.Spaces {
		s := &m.Spaces[i]
		if float64(s.Entries) > above || p.hasChanges(s.Netns) {
			matter = append(matter, s)
		}
	}
	var errs []error
	for _, s := range matter {
		most := max(sampleEntries/len(matter), leastSample)
		err := found[s.Netns].Do(func(c *conntrack.Conn) error { return s.sample(ctx, c, most) })
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("measure conntrack of %s: %w", s.Name, err))
		}
	}
	return errors.Join(errs...)
}

// hasChanges reports whether a timeout of the namespace is changed.
func (p *Pilot) hasChanges(netns uint64) bool {
	for s := range p.mem.Records {
		if s.Netns == netns {
			return true
		}
	}
	return false
}

// sample reads the namespace's timeouts, and the ages of at most most entries.
func (s *space) sample(ctx context.Context, c *conntrack.Conn, most int) error {
	limits, err := conntrack.ReadLimits()
	if err != nil {
		return err
	}
	ages := map[string]*capacity.Ages{}
	s.Timeouts = map[string]int{}
	for sysctl := range shortest {
		t := limits.Timeout(sysctl)
		s.Timeouts[sysctl], ages[sysctl] = int(t/time.Second), &capacity.Ages{Timeout: t}
	}
	seen := 0
	err = c.Dump(ctx, conntrack.Filter{}, func(e *conntrack.Entry) bool {
		if a := ages[timeoutOf(e)]; a != nil {
			a.Add(e.Timeout)
		}
		seen++
		return seen < most
	})
	scale := 1.0
	if seen >= most {
		scale = max(1, float64(s.Entries)/float64(seen))
	}
	s.Ages = make(map[string]capacity.Ages, len(ages))
	for sysctl, a := range ages {
		s.Ages[sysctl] = a.Scaled(scale)
	}
	return err
}

// timeoutOf returns the managed timeout of an entry, "" for others. A UDP flow becomes
// assured when it gets the longer timeout (nf_conntrack_udp_packet).
func timeoutOf(e *conntrack.Entry) string {
	switch {
	case e.Protocol == unix.IPPROTO_UDP && e.Status&conntrack.Assured == 0:
		return timeoutUDP
	case e.Protocol == unix.IPPROTO_UDP:
		return timeoutUDPStream
	case e.Protocol == unix.IPPROTO_TCP && e.TCPState == tcpTimeWait:
		return timeoutTimeWait
	case e.Protocol == unix.IPPROTO_TCP && e.TCPState == tcpFinWait:
		return timeoutFinWait
	}
	return ""
}

// named finds a namespace by its cookie.
func named(list []conntrack.Namespace, cookie uint64) (conntrack.Namespace, bool) {
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool {
		same := cookie == 0 && n.Own
		_ = n.Enter(func() error {
			own, err := kernel.NetnsCookie()
			same = same || err == nil && own == cookie
			return err
		})
		return same
	})
	if i < 0 {
		return conntrack.Namespace{}, false
	}
	return list[i], true
}
