// Package capacity is the arithmetic of conntrack: how many entries a rate of
// new connections keeps in the table, what they cost, and the highest rate that
// a table carries. Pure functions; every constant says where it is from.
//
//	entries = new connections/s × time that an entry is kept      (Little's law)
//
// The time is how long the connection lives and then the time-out of the state
// that its last packet left it in.
package capacity

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Timeouts are conntrack's, of one network namespace. The zero value of a field
// is 0 seconds, not a default; start from DefaultTimeouts.
type Timeouts struct {
	UDP          time.Duration `json:"udp"`          // nf_conntrack_udp_timeout: unanswered, or answered for less than 2 s
	UDPStream    time.Duration `json:"udp_stream"`   // answered, and still used after 2 s
	TCPSynSent   time.Duration `json:"tcp_syn_sent"` // a SYN without an answer
	TCPEstablish time.Duration `json:"tcp_established"`
	TCPTimeWait  time.Duration `json:"tcp_time_wait"` // closed by both sides
	TCPClose     time.Duration `json:"tcp_close"`     // reset
	ICMP         time.Duration `json:"icmp"`
	UDPStreamAt  time.Duration `json:"-"` // age from which UDPStream counts
}

// DefaultTimeouts are Linux's since 5.0 (net/netfilter/nf_conntrack_proto_*.c;
// Documentation/networking/nf_conntrack-sysctl.rst). Before, udp_stream was 180 s
// and began with the first answer.
var DefaultTimeouts = Timeouts{
	UDP: 30 * time.Second, UDPStream: 120 * time.Second, UDPStreamAt: 2 * time.Second,
	TCPSynSent: 120 * time.Second, TCPEstablish: 5 * 24 * time.Hour, TCPTimeWait: 120 * time.Second, TCPClose: 10 * time.Second,
	ICMP: 30 * time.Second,
}

// Kind is a sort of connection, by how it ends.
type Kind string

// The kinds that the arithmetic knows.
const (
	UDPUnanswered Kind = "udp-unanswered" // one way only
	UDPAnswered   Kind = "udp"            // questions and answers, as DNS
	TCPClosed     Kind = "tcp"            // closed in good order by both sides
	TCPReset      Kind = "tcp-reset"      // ended by RST
	TCPUnanswered Kind = "tcp-unanswered" // SYNs to nobody
	TCPIdle       Kind = "tcp-idle"       // left open
	ICMPEcho      Kind = "icmp"
	TFTP          Kind = "tftp" // a transfer: the request, and the data from another port
)

// Kinds lists every Kind.
var Kinds = []Kind{UDPAnswered, UDPUnanswered, TCPClosed, TCPReset, TCPUnanswered, TCPIdle, ICMPEcho, TFTP}

// Helper is what a connection costs beyond entries of its own protocol.
type Helper struct {
	Expectations  int           // that are made for each connection
	ExpectTimeout time.Duration // how long one waits that nothing fulfils
}

// TFTPHelper: one expectation a request, kept for 300 s if the data never comes
// (nf_conntrack_tftp.c). One that comes takes it away.
var TFTPHelper = Helper{Expectations: 1, ExpectTimeout: 300 * time.Second}

// Load is a stream of new connections of one kind.
type Load struct {
	Kind Kind          `json:"kind"`
	Rate float64       `json:"rate"`        // new connections a second
	Life time.Duration `json:"lifetime_ns"` // from the first packet to the last
}

// Validate says what is out of range.
func (l Load) Validate() error {
	switch {
	case math.IsNaN(l.Rate) || math.IsInf(l.Rate, 0) || l.Rate < 0:
		return fmt.Errorf("rate %v: must be 0 or more connections a second", l.Rate)
	case l.Life < 0:
		return fmt.Errorf("lifetime %v: must not be negative", l.Life)
	}
	_, err := Kept(l.Kind, l.Life, Timeouts{})
	return err
}

// Kept is how long each entry of one connection stays in the table: as many
// durations as it has entries. The kernel sweeps the table now and then
// (gc_worker, at most every 60 s), so that nf_conntrack_count is somewhat more.
func Kept(kind Kind, life time.Duration, t Timeouts) ([]time.Duration, error) {
	udp := t.UDP
	if life > t.UDPStreamAt {
		udp = t.UDPStream
	}
	switch kind {
	case UDPUnanswered:
		return []time.Duration{life + t.UDP}, nil
	case UDPAnswered:
		return []time.Duration{life + udp}, nil
	case TCPClosed:
		return []time.Duration{life + t.TCPTimeWait}, nil
	case TCPReset:
		return []time.Duration{life + t.TCPClose}, nil
	case TCPUnanswered:
		return []time.Duration{life + t.TCPSynSent}, nil
	case TCPIdle:
		return []time.Duration{life + t.TCPEstablish}, nil
	case ICMPEcho:
		return []time.Duration{life + t.ICMP}, nil
	case TFTP:
		// The request is never answered from the port that it went to.
		return []time.Duration{t.UDP, life + udp}, nil
	}
	return nil, fmt.Errorf("%q is no kind of connection: use one of %v", kind, Kinds)
}

// Entries is how many entries these loads keep in the table, in the long run.
func Entries(loads []Load, t Timeouts) (float64, error) {
	total := 0.0
	for _, l := range loads {
		if err := l.Validate(); err != nil {
			return 0, err
		}
		kept, _ := Kept(l.Kind, l.Life, t)
		for _, k := range kept {
			total += l.Rate * k.Seconds()
		}
	}
	return total, nil
}

// Ceiling is the highest rate of connections of one kind that a table of so many
// entries carries, in connections a second. +Inf if nothing is kept.
func Ceiling(entries int, kind Kind, life time.Duration, t Timeouts) (float64, error) {
	kept, err := Kept(kind, life, t)
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for _, k := range kept {
		sum += k.Seconds()
	}
	return float64(entries) / sum, nil
}

// Expectations is how many expectations wait at once: for the time until the
// expected packet comes, and for those that lost it until they time out. lost is
// the part of connections, from 0 to 1, whose expected packet never comes.
func Expectations(rate float64, h Helper, wait time.Duration, lost float64) float64 {
	return rate * float64(h.Expectations) * ((1-lost)*wait.Seconds() + lost*h.ExpectTimeout.Seconds())
}

// ExpectMax is the kernel's limit of expectations for a number of buckets:
// buckets/256, at least 1, times 4 (nf_conntrack_expect_init).
func ExpectMax(buckets int) int { return max(buckets/256, 1) * 4 }

// Sizes of the kernel's structures on 64-bit machines, Linux 6.18.
const (
	// EntryBytes is struct nf_conn's slab object, 256, and an extension block
	// for NAT, accounting and helper of 128 at most (nf_ct_ext in kmalloc-128).
	EntryBytes = 256 + 128
	// BucketBytes is struct hlist_nulls_head.
	BucketBytes = 8
	// ExpectBytes is struct nf_conntrack_expect's slab object.
	ExpectBytes = 216
)

// Memory is what a table costs when it is full, in bytes. Buckets are paid for
// at once, entries when they are made.
func Memory(entries, buckets, expectations int) int64 {
	return int64(entries)*EntryBytes + int64(buckets)*BucketBytes + int64(expectations)*ExpectBytes
}

// SNATCeiling is the highest rate of new connections that one source address can
// make to one destination address and port: every port is in use until its
// entry is forgotten.
func SNATCeiling(ports int, kept time.Duration) float64 { return float64(ports) / kept.Seconds() }

// SNATPorts is how many ports masquerading chooses from when the client's own is
// taken or --random-fully asks: 1024 to 65535 (nf_nat_l4proto_unique_tuple).
const SNATPorts = 64512

// FullIn is when a table fills at which entries come faster than they go. It
// returns false if it does not, in the long run.
func FullIn(entries, limit int, perSecond float64) (time.Duration, bool) {
	if entries >= limit {
		return 0, true
	}
	if perSecond <= 0 {
		return 0, false
	}
	seconds := float64(limit-entries) / perSecond
	if seconds > math.MaxInt64/float64(time.Second) {
		return 0, false
	}
	return time.Duration(seconds * float64(time.Second)), true
}

// Plan is the answer to both questions: what a load needs, and what a table
// carries.
type Plan struct {
	Loads        []Load    `json:"loads"`
	Timeouts     Timeouts  `json:"timeouts_ns"`
	Entries      int       `json:"entries"`            // kept in the long run
	Expectations int       `json:"expectations"`       // waiting at once
	Table        int       `json:"table"`              // entries with head-room
	Buckets      int       `json:"buckets"`            // as many as entries: chains of one
	ExpectMax    int       `json:"expect_max"`         // that many buckets bring
	ExpectFit    bool      `json:"expect_fit"`         // whether Expectations are no more than ExpectMax
	Bytes        int64     `json:"bytes"`              // of a table full to Table
	Ceilings     []float64 `json:"ceilings,omitempty"` // for each load, connections/s of the given table
}

// Config is what a Plan is made from.
type Config struct {
	Loads    []Load
	Timeouts Timeouts
	HeadRoom float64       // part of the table that stays free, from 0 to less than 1
	Limit    int           // entries of a table to find the ceiling of; 0: none
	Wait     time.Duration // from a helper's request to the packet that it expects
	Lost     float64       // part of expectations that nothing fulfils
}

// Validate says what is missing or out of range.
func (c Config) Validate() error {
	if len(c.Loads) == 0 {
		return errors.New("no load")
	}
	for _, l := range c.Loads {
		if err := l.Validate(); err != nil {
			return err
		}
	}
	switch {
	case !(c.HeadRoom >= 0 && c.HeadRoom < 1): // NaN is neither
		return fmt.Errorf("head-room %v: must be from 0 to less than 1", c.HeadRoom)
	case !(c.Lost >= 0 && c.Lost <= 1):
		return fmt.Errorf("lost part %v: must be from 0 to 1", c.Lost)
	case c.Limit < 0 || c.Wait < 0:
		return errors.New("table and wait must not be negative")
	}
	return nil
}

// Make works out the Plan.
func Make(c Config) (Plan, error) {
	if err := c.Validate(); err != nil {
		return Plan{}, err
	}
	entries, err := Entries(c.Loads, c.Timeouts)
	if err != nil {
		return Plan{}, err
	}
	if entries > math.MaxInt32 {
		return Plan{}, fmt.Errorf("%.0f entries are more than a table can hold (%d): shorten the time-outs", entries, math.MaxInt32)
	}
	table := math.Ceil(entries / (1 - c.HeadRoom))
	if table > math.MaxInt32 {
		return Plan{}, fmt.Errorf("%.0f entries with head-room %v are more than a table can hold (%d): leave less free", entries, c.HeadRoom, math.MaxInt32)
	}
	p := Plan{Loads: c.Loads, Timeouts: c.Timeouts, Entries: int(math.Ceil(entries)), Table: int(table), Buckets: int(table)}
	expectations := 0.0
	for _, l := range c.Loads {
		if l.Kind == TFTP {
			expectations += Expectations(l.Rate, TFTPHelper, c.Wait, c.Lost)
		}
		if c.Limit > 0 {
			ceiling, err := Ceiling(c.Limit, l.Kind, l.Life, c.Timeouts)
			if err != nil {
				return Plan{}, err
			}
			if math.IsInf(ceiling, 0) {
				return Plan{}, fmt.Errorf("no table is too small for %s: nothing is kept; give it a lifetime or a longer time-out", l.Kind)
			}
			p.Ceilings = append(p.Ceilings, ceiling)
		}
	}
	if expectations > math.MaxInt32 {
		return Plan{}, fmt.Errorf("%.0f expectations are more than the kernel can count (%d): plan for a lower rate", expectations, math.MaxInt32)
	}
	p.Expectations = int(math.Ceil(expectations))
	p.ExpectMax = ExpectMax(p.Buckets)
	p.ExpectFit = p.Expectations <= p.ExpectMax
	p.Bytes = Memory(p.Table, p.Buckets, p.Expectations)
	return p, nil
}
