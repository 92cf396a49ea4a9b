// Package capacity calculates conntrack's capacity. It returns the entries that a rate of
// new connections keeps in the table, their memory, and the highest rate that a table
// carries. Its functions are pure; every constant names its source.
//
//	entries = new connections/s × time that an entry is kept      (Little's law)
//
// The time is the lifetime of the connection plus the timeout of its last state.
package capacity

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// Timeouts are the conntrack timeouts of one network namespace. The zero value of a
// field is 0 seconds, not a default; start from DefaultTimeouts.
type Timeouts struct {
	UDP          time.Duration `json:"udp"`          // nf_conntrack_udp_timeout: unreplied, or replied for less than 2 s
	UDPStream    time.Duration `json:"udp_stream"`   // replied, and still active after 2 s
	TCPSynSent   time.Duration `json:"tcp_syn_sent"` // a SYN without a reply
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

// Kind classifies connections by their end.
type Kind string

// The known kinds.
const (
	UDPUnanswered Kind = "udp-unanswered" // one direction only
	UDPAnswered   Kind = "udp"            // requests and replies, as DNS
	TCPClosed     Kind = "tcp"            // closed by FIN from both sides
	TCPReset      Kind = "tcp-reset"      // ended by RST
	TCPUnanswered Kind = "tcp-unanswered" // SYNs without a reply
	TCPIdle       Kind = "tcp-idle"       // left open
	ICMPEcho      Kind = "icmp"
	TFTP          Kind = "tftp" // a transfer: the request, and the data from another port
)

// Kinds lists every Kind.
var Kinds = []Kind{UDPAnswered, UDPUnanswered, TCPClosed, TCPReset, TCPUnanswered, TCPIdle, ICMPEcho, TFTP}

// kindNames lists Kinds as text.
func kindNames() string {
	var names []string
	for _, k := range Kinds {
		names = append(names, string(k))
	}
	return strings.Join(names, ", ")
}

// helper describes the expectations that a conntrack helper creates for a connection.
type helper struct {
	Expectations  int           // per connection
	ExpectTimeout time.Duration // lifetime of an unused expectation
}

// tftpHelper is the kernel's helper for TFTP. It creates one expectation per request, which
// stays for 300 s if the data never arrives (nf_conntrack_tftp.c). Arriving data removes it.
var tftpHelper = helper{Expectations: 1, ExpectTimeout: 300 * time.Second}

// Load is a rate of new connections of one kind.
type Load struct {
	Kind Kind          `json:"kind"`
	Rate float64       `json:"rate"`       // new connections a second
	Life time.Duration `json:"lifetimeNs"` // from the first packet to the last
}

// Validate reports a value that is out of range.
func (l Load) Validate() error {
	switch {
	case math.IsNaN(l.Rate) || math.IsInf(l.Rate, 0) || l.Rate < 0:
		return fmt.Errorf("rate %v: must be 0 or more connections a second", l.Rate)
	case l.Life < 0:
		return fmt.Errorf("lifetime %v: must not be negative", l.Life)
	}
	_, err := keptFor(l.Kind, l.Life, Timeouts{})
	return err
}

// keptFor returns how long each entry of one connection stays in the table: one duration
// per entry. The kernel removes expired entries later (gc_worker, at most every 60 s),
// so nf_conntrack_count is somewhat larger.
func keptFor(kind Kind, life time.Duration, t Timeouts) ([]time.Duration, error) {
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
		// The server never replies from the port of the request.
		return []time.Duration{t.UDP, life + udp}, nil
	}
	return nil, fmt.Errorf("%q is not a kind of connection: use one of %s", kind, kindNames())
}

// entriesOf returns the number of entries that the loads keep in the table, in the long
// run.
func entriesOf(loads []Load, t Timeouts) (float64, error) {
	total := 0.0
	for _, l := range loads {
		if err := l.Validate(); err != nil {
			return 0, err
		}
		kept, _ := keptFor(l.Kind, l.Life, t)
		for _, k := range kept {
			total += l.Rate * k.Seconds()
		}
	}
	return total, nil
}

// ceilingOf returns the highest rate of connections of one kind that a table of the given
// size carries, in connections per second. It is +Inf if no entry stays.
func ceilingOf(entries int, kind Kind, life time.Duration, t Timeouts) (float64, error) {
	kept, err := keptFor(kind, life, t)
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for _, k := range kept {
		sum += k.Seconds()
	}
	return float64(entries) / sum, nil
}

// expectationsOf returns the number of expectations that exist at the same time. Each
// exists until the expected packet arrives, or until its timeout. lost is the part of
// connections, from 0 to 1, whose expected packet never arrives.
func expectationsOf(rate float64, h helper, wait time.Duration, lost float64) float64 {
	return rate * float64(h.Expectations) * ((1-lost)*wait.Seconds() + lost*h.ExpectTimeout.Seconds())
}

// ExpectMax returns the kernel's limit of expectations for a number of buckets:
// buckets/256, at least 1, times 4 (nf_conntrack_expect_init).
func ExpectMax(buckets int) int { return max(buckets/256, 1) * 4 }

// Sizes of the kernel's structures on 64-bit machines, Linux 6.18.
const (
	// entryBytes is struct nf_conn's slab object, 256, and an extension block
	// for NAT, accounting and helper of 128 at most (nf_ct_ext in kmalloc-128).
	entryBytes = 256 + 128
	// BucketBytes is struct hlist_nulls_head.
	BucketBytes = 8
	// expectBytes is struct nf_conntrack_expect's slab object.
	expectBytes = 216
)

// Memory returns the size of a full table in bytes. The kernel allocates buckets at once,
// and each entry when it is created.
func Memory(entries, buckets, expectations int) int64 {
	return int64(entries)*entryBytes + int64(buckets)*BucketBytes + int64(expectations)*expectBytes
}

// snatPorts is the number of ports from which masquerading chooses if the client's own
// port is in use, or with --random-fully: 1024 to 65535 (nf_nat_l4proto_unique_tuple).
const snatPorts = 64512

// Shares of a table from which it counts as close to full, and as full.
const (
	CloseToFull = 0.80
	Full        = 0.95
)

// FullIn returns the time until a growing table is full. It returns false if the table
// never fills.
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

// Plan is the result of Make: the sizes that a load needs, and the ceilings of a table.
type Plan struct {
	Loads        []Load    `json:"loads"`
	Timeouts     Timeouts  `json:"timeoutsNs"`
	Entries      int       `json:"entries"`            // kept in the long run
	Expectations int       `json:"expectations"`       // waiting at once
	Table        int       `json:"table"`              // Entries plus headroom
	Buckets      int       `json:"buckets"`            // one per entry
	ExpectMax    int       `json:"expectMax"`          // limit that the kernel derives from Buckets
	ExpectFit    bool      `json:"expectFit"`          // Expectations <= ExpectMax
	Bytes        int64     `json:"bytes"`              // memory of a full table of size Table
	Ceilings     []float64 `json:"ceilings,omitempty"` // per load: connections/s that the given table carries
}

// Config is the input of Make.
type Config struct {
	Loads    []Load
	Timeouts Timeouts
	Headroom float64       // part of the table that stays free, from 0 to less than 1
	Limit    int           // table size for Ceilings; 0: none
	Wait     time.Duration // from a helper's request to the expected packet
	Lost     float64       // part of expectations that stay unused
}

// Validate reports a missing value or one out of range.
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
	case !(c.Headroom >= 0 && c.Headroom < 1): // NaN fails both comparisons
		return fmt.Errorf("headroom %v: must be from 0 to less than 1", c.Headroom)
	case !(c.Lost >= 0 && c.Lost <= 1):
		return fmt.Errorf("lost part %v: must be from 0 to 1", c.Lost)
	case c.Limit < 0 || c.Wait < 0:
		return errors.New("table and wait must not be negative")
	}
	return nil
}

// Make calculates the Plan.
func Make(c Config) (Plan, error) {
	if err := c.Validate(); err != nil {
		return Plan{}, err
	}
	entries, err := entriesOf(c.Loads, c.Timeouts)
	if err != nil {
		return Plan{}, err
	}
	if entries > math.MaxInt32 {
		return Plan{}, fmt.Errorf("%.0f entries do not fit into a table (at most %d): shorten the timeouts", entries, math.MaxInt32)
	}
	table := math.Ceil(entries / (1 - c.Headroom))
	if table > math.MaxInt32 {
		return Plan{}, fmt.Errorf("%.0f entries with headroom %v do not fit into a table (at most %d): reduce the headroom", entries,
			c.Headroom, math.MaxInt32)
	}
	p := Plan{Loads: c.Loads, Timeouts: c.Timeouts, Entries: int(math.Ceil(entries)), Table: int(table), Buckets: int(table)}
	expectations := 0.0
	for _, l := range c.Loads {
		if l.Kind == TFTP {
			expectations += expectationsOf(l.Rate, tftpHelper, c.Wait, c.Lost)
		}
		if c.Limit > 0 {
			ceiling, err := ceilingOf(c.Limit, l.Kind, l.Life, c.Timeouts)
			if err != nil {
				return Plan{}, err
			}
			if math.IsInf(ceiling, 0) {
				return Plan{}, fmt.Errorf("%s has no ceiling: no entry stays in the table; set a lifetime or a longer timeout", l.Kind)
			}
			p.Ceilings = append(p.Ceilings, ceiling)
		}
	}
	if expectations > math.MaxInt32 {
		return Plan{}, fmt.Errorf("%.0f expectations exceed the kernel's counter (%d): plan for a lower rate", expectations, math.MaxInt32)
	}
	p.Expectations = int(math.Ceil(expectations))
	p.ExpectMax = ExpectMax(p.Buckets)
	p.ExpectFit = p.Expectations <= p.ExpectMax
	p.Bytes = Memory(p.Table, p.Buckets, p.Expectations)
	return p, nil
}
