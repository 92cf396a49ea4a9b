package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// LogKind classifies lines of the kernel's log about conntrack.
type LogKind string

// The kinds of line. The kernel writes at most ten of a kind in five seconds
// (net_ratelimit): Counters tell the number of drops, and the log tells the time.
const (
	TableFull       LogKind = "table full"             // nf_conntrack_core.c: a packet was dropped
	ExpectTableFull LogKind = "expectation table full" // nf_conntrack_expect.c: an expectation was not made
)

// LogLine is one line of the kernel's log about conntrack.
type LogLine struct {
	Kind LogKind `json:"kind"`
	// Netns is the number of the network namespace that the kernel names; 0: none. From Linux 6.17 on,
	// lines about a full table name every namespace but the machine's first.
	Netns uint64        `json:"netns,omitempty"`
	At    time.Duration `json:"at"` // since the machine started
	Text  string        `json:"text"`
}

// LogCount adds up lines of one kind.
type LogCount struct {
	Lines       int           `json:"lines"`
	First, Last time.Duration // since the machine started
	// ByNetns adds up the same lines by LogLine.Netns.
	ByNetns map[uint64]LogCount `json:"byNetns,omitempty"`
}

// with returns the count with one line more.
func (c LogCount) with(at time.Duration) LogCount {
	if c.Lines == 0 {
		c.First = at
	}
	c.Lines++
	c.Last = at
	return c
}

// rate returns the lines per second between the first and the last; 0 for fewer than two.
func (c LogCount) rate() float64 {
	if c.Lines < 2 || c.Last <= c.First {
		return 0
	}
	return float64(c.Lines-1) / (c.Last - c.First).Seconds()
}

// KernelLog counts the lines about conntrack in the kernel's log, by kind. It does not
// wait for new lines.
func KernelLog(ctx context.Context) (map[LogKind]LogCount, error) {
	f, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read kernel log: %w", err)
	}
	defer f.Close()
	counts := map[LogKind]LogCount{}
	// One read returns one record; the poller would wait at the end.
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("read kernel log: %w", err)
	}
	buf := make([]byte, 8192) // CONSOLE_EXT_LOG_MAX
	for ctx.Err() == nil {
		n := 0
		var rerr error
		if err := raw.Control(func(fd uintptr) { n, rerr = unix.Read(int(fd), buf) }); err != nil {
			return nil, fmt.Errorf("read kernel log: %w", err)
		}
		switch {
		case errors.Is(rerr, unix.EAGAIN) || rerr == nil && n <= 0:
			return counts, nil
		case errors.Is(rerr, unix.EPIPE) || errors.Is(rerr, unix.EINTR): // overwritten while read: go on
		case rerr != nil:
			return nil, fmt.Errorf("read kernel log: %w", rerr)
		default:
			countLine(counts, string(buf[:n]))
		}
	}
	return counts, ctx.Err()
}

func countLine(counts map[LogKind]LogCount, record string) {
	l, ok := parseLogLine(record)
	if !ok {
		return
	}
	c := counts[l.Kind].with(l.At)
	if c.ByNetns == nil {
		c.ByNetns = map[uint64]LogCount{}
	}
	c.ByNetns[l.Netns] = c.ByNetns[l.Netns].with(l.At)
	counts[l.Kind] = c
}

// parseLogLine reads a record of /dev/kmsg, "level,sequence,microseconds,flags;
// text" (Documentation/ABI/testing/dev-kmsg), if conntrack wrote it. Level
// numbers from 8 belong to other facilities, which programs write.
func parseLogLine(record string) (LogLine, bool) {
	head, text, ok := strings.Cut(record, ";")
	fields := strings.Split(head, ",")
	if !ok || len(fields) < 3 {
		return LogLine{}, false
	}
	level, err := strconv.Atoi(fields[0])
	micros, terr := strconv.ParseInt(fields[2], 10, 64)
	if err != nil || terr != nil || level > 7 {
		return LogLine{}, false
	}
	text, _, _ = strings.Cut(text, "\n")
	l := LogLine{At: time.Duration(micros) * time.Microsecond, Text: text}
	// The kernel begins it with the module's name, twice in nf_conntrack_core.c. Later text may be of a
	// process, such as its name and program where it crashes.
	text, ours := strings.CutPrefix(text, "nf_conntrack: ")
	text = strings.TrimPrefix(text, "nf_conntrack: ")
	switch {
	case ours && strings.HasPrefix(text, "expectation table full"):
		l.Kind = ExpectTableFull
	case ours && strings.HasPrefix(text, "table full"):
		l.Kind = TableFull
		if number, named := strings.CutPrefix(text, "table full in netns "); named {
			number, _, _ = strings.Cut(number, ",")
			l.Netns, _ = strconv.ParseUint(number, 10, 64)
		}
	default:
		return LogLine{}, false
	}
	return l, true
}
