package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Counters are conntrack's counters of one namespace since its creation, summed over all
// CPUs. The kernel uses 32 bits per CPU, so they wrap. The meanings are as in
// net/netfilter/nf_conntrack_core.c of Linux 6.18.
type Counters struct {
	Found   uint64 `json:"found"`   // an allocated tuple was in use; SNAT then tries another
	Invalid uint64 `json:"invalid"` // packets that could not be tracked
	Insert  uint64 `json:"insert"`  // entries inserted; since Linux 5.10 only entries created over netlink
	// entries that lost a race, had a bucket that is too long, or were dying; their packet is dropped unless the clash was resolved
	InsertFailed  uint64 `json:"insertFailed"`
	Drop          uint64 `json:"drop"`          // packets dropped: table full, or insert_failed
	EarlyDrop     uint64 `json:"earlyDrop"`     // entries evicted early from a full table
	Error         uint64 `json:"error"`         // malformed packets
	SearchRestart uint64 `json:"searchRestart"` // lookups restarted because the table was resized
	ClashResolve  uint64 `json:"clashResolve"`  // races resolved without a drop (UDP)
	ChainTooLong  uint64 `json:"chaintoolong"`  // inserts refused because the bucket was too long
}

// field returns the counter of an attribute (enum ctattr_stats_cpu); nil for others.
func (c *Counters) field(kind uint16) *uint64 {
	switch kind {
	case 2:
		return &c.Found
	case 4:
		return &c.Invalid
	case 8:
		return &c.Insert
	case 9:
		return &c.InsertFailed
	case 10:
		return &c.Drop
	case 11:
		return &c.EarlyDrop
	case 12:
		return &c.Error
	case 13:
		return &c.SearchRestart
	case 14:
		return &c.ClashResolve
	case 15:
		return &c.ChainTooLong
	}
	return nil
}

// Any reports whether a counter is not zero.
func (c Counters) Any() bool { return c != Counters{} }

// CPUCounters are the Counters of one CPU.
type CPUCounters struct {
	CPU int `json:"cpu"`
	Counters
}

// cpuStats reads the counters of every CPU.
func (c *Conn) cpuStats(ctx context.Context) ([]CPUCounters, error) {
	var out []CPUCounters
	err := dumpAgain(ctx, func() error {
		out = out[:0]
		return c.dumpAll(unix.NFNL_SUBSYS_CTNETLINK, msgGetStatsCPU, unix.AF_UNSPEC, nil, func(b []byte) bool {
			if len(b) < nl.SizeofNfgenmsg {
				return true
			}
			cpu := CPUCounters{CPU: int(be16(b[2:]))} // res_id of struct nfgenmsg
			eachAttr(b[nl.SizeofNfgenmsg:], func(kind uint16, v []byte) {
				if f := cpu.field(kind); f != nil {
					*f = uint64(be32(v))
				}
			})
			out = append(out, cpu)
			return true
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read conntrack counters: %w", err)
	}
	return out, nil
}

// Stats reads the counters, summed over all CPUs.
func (c *Conn) Stats(ctx context.Context) (Counters, error) {
	cpus, err := c.cpuStats(ctx)
	var sum Counters
	for _, cpu := range cpus {
		sum.add(cpu.Counters)
	}
	return sum, err
}

// Size reads the number of entries, including expired ones that the kernel has not
// removed yet, and the maximum.
func (c *Conn) Size() (entries, limit uint32, err error) {
	// The only reply announces more messages (NLM_F_MULTI); the ACK ends it.
	req := c.request(unix.NFNL_SUBSYS_CTNETLINK, msgGetStats, unix.NLM_F_ACK, unix.AF_UNSPEC)
	msgs, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, 0, fmt.Errorf("read size of conntrack table: %w", meaning(err))
	}
	for _, b := range msgs {
		if len(b) < nl.SizeofNfgenmsg {
			continue
		}
		// enum ctattr_stats_global
		eachAttr(b[nl.SizeofNfgenmsg:], func(kind uint16, v []byte) {
			switch kind {
			case 1:
				entries = be32(v)
			case 2:
				limit = be32(v)
			}
		})
	}
	return entries, limit, nil
}

// Expectations counts the expectations by helper, under "" for a helper without a name.
// The kernel has no counter for them.
func (c *Conn) Expectations(ctx context.Context) (map[string]int, error) {
	const helpName = 6 // CTA_EXPECT_HELP_NAME
	var out map[string]int
	err := dumpAgain(ctx, func() error {
		out = map[string]int{}
		return c.dumpAll(unix.NFNL_SUBSYS_CTNETLINK_EXP, msgExpectGet, unix.AF_UNSPEC, nil, func(b []byte) bool {
			helper := ""
			if len(b) >= nl.SizeofNfgenmsg {
				eachAttr(b[nl.SizeofNfgenmsg:], func(kind uint16, v []byte) {
					if kind == helpName {
						helper = unix.ByteSliceToString(v)
					}
				})
			}
			out[helper]++
			return true
		})
	})
	if err != nil {
		return nil, fmt.Errorf("dump expectations: %w", err)
	}
	return out, nil
}

func eachAttr(b []byte, do func(kind uint16, value []byte)) {
	for {
		kind, v, rest, ok := nextAttr(b)
		if !ok {
			return
		}
		do(kind, v)
		b = rest
	}
}

// Limits are the sizes and timeouts of a namespace.
type Limits struct {
	Max       int `json:"max"`       // nf_conntrack_max: entries per namespace
	Buckets   int `json:"buckets"`   // of the hash table that all namespaces share
	ExpectMax int `json:"expectMax"` // nf_conntrack_expect_max: expectations per namespace
	// Timeouts are the namespace's own, by the sysctl's name without
	// "nf_conntrack_" and "_timeout" ("udp", "udp_stream", "tcp_established").
	Timeouts map[string]time.Duration `json:"timeoutsNs"`
}

// Timeout returns the timeout of a sysctl by its full name, 0 for an unknown name.
func (l Limits) Timeout(sysctl string) time.Duration { return l.Timeouts[timeoutName(sysctl)] }

// knownTimeouts lists the names of this kernel's timeouts. They are the same in every
// namespace and listed once: listing takes longer than reading the values.
var knownTimeouts atomic.Pointer[[]string]

func timeoutSysctls() (names []string) {
	if known := knownTimeouts.Load(); known != nil {
		return *known
	}
	paths, _ := filepath.Glob(filepath.Join(sysctlDir, "nf_conntrack_*timeout*"))
	for _, path := range paths {
		names = append(names, filepath.Base(path))
	}
	if len(names) > 0 { // otherwise the module is not loaded yet
		knownTimeouts.Store(&names)
	}
	return names
}

// ReadCount reads the number of entries of the calling thread's network namespace,
// including expired ones that the kernel has not removed yet. It needs no Conn.
func ReadCount() (int, error) {
	n, err := readNumber(SysctlCount)
	if errors.Is(err, os.ErrNotExist) {
		return 0, ErrUnsupported
	}
	return n, err
}

// ReadSize reads the number of entries of the calling thread's network namespace, and of the
// buckets that a dump walks, which all namespaces share.
func ReadSize() (entries, buckets int, err error) {
	if entries, err = ReadCount(); err != nil {
		return 0, 0, err
	}
	buckets, err = readNumber(SysctlBuckets)
	return entries, buckets, err
}

// ReadLimits reads the Limits of the calling thread's network namespace.
func ReadLimits() (Limits, error) {
	names := timeoutSysctls()
	l := Limits{Timeouts: make(map[string]time.Duration, len(names))}
	var errs []error
	read := func(name string) int {
		n, err := readNumber(name)
		errs = append(errs, err)
		return n
	}
	l.Max, l.Buckets, l.ExpectMax = read(SysctlMax), read(SysctlBuckets), read(SysctlExpectMax)
	for _, name := range names {
		l.Timeouts[timeoutName(name)] = time.Duration(read(name)) * time.Second
	}
	err := errors.Join(errs...)
	if errors.Is(err, os.ErrNotExist) {
		return l, ErrUnsupported
	}
	return l, err
}

// readNumber reads one conntrack sysctl without a file object or a heap buffer, since
// callers read many.
func readNumber(name string) (int, error) {
	fd, err := unix.Open(sysctlDir+"/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("read sysctl %s: %w", SysctlPrefix+name, err)
	}
	defer unix.Close(fd)
	var buf [32]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, fmt.Errorf("read sysctl %s: %w", SysctlPrefix+name, err)
	}
	v, err := strconv.Atoi(strings.TrimSpace(string(buf[:max(n, 0)])))
	if err != nil {
		return 0, fmt.Errorf("read sysctl %s: %w", SysctlPrefix+name, err)
	}
	return v, nil
}

// timeoutName shortens "nf_conntrack_tcp_timeout_syn_sent" to "tcp_syn_sent".
func timeoutName(sysctl string) string {
	s := strings.TrimPrefix(sysctl, "nf_conntrack_")
	return strings.Replace(s, "_timeout", "", 1)
}

// TimeoutSysctl returns the sysctl of a timeout by its name in Limits.
func TimeoutSysctl(name string) string {
	protocol, state, _ := strings.Cut(name, "_")
	if state != "" {
		state = "_" + state
	}
	return SysctlPrefix + "nf_conntrack_" + protocol + "_timeout" + state
}

// TimeoutName returns the timeout that applies to the entry's state, by its name in
// Limits; "" for an unknown protocol.
func (e *Entry) TimeoutName() string {
	switch e.Protocol {
	case unix.IPPROTO_TCP:
		return "tcp_" + e.state()
	case unix.IPPROTO_UDP:
		// A flow becomes ASSURED and a stream at the same time (nf_conntrack_udp_packet).
		if e.Status&Assured != 0 {
			return "udp_stream"
		}
		return "udp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	}
	return ""
}

// Minus returns the growth since before, with wrapping: the kernel uses 32 bits per CPU.
func (c Counters) Minus(before Counters) Counters {
	for kind := range uint16(16) {
		if f := c.field(kind); f != nil {
			*f = uint64(uint32(*f - *before.field(kind)))
		}
	}
	return c
}
