package soak

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Loss is an honest question that was not answered, or a connection that broke.
type Loss struct {
	At     time.Duration `json:"at"`   // when the question was sent, since the start
	Took   time.Duration `json:"took"` // until the error
	Flow   string        `json:"flow"`
	Kind   string        `json:"kind"`
	Local  string        `json:"local,omitempty"`
	Server string        `json:"server,omitempty"` // that answered before
	Error  string        `json:"error"`
	// Again tells of a lost datagram that the next one of the same socket was answered.
	Again  bool   `json:"again,omitempty"`
	Action string `json:"action"` // the last one before the question
	Number int    `json:"number"` // of the action
	// Excuse is the documented reason, "" for a loss that counts.
	Excuse string `json:"excuse,omitempty"`

	at     time.Time
	opened time.Time // of a socket that is kept
	flowInfo
}

// flowInfo is what an excuse asks of a flow.
type flowInfo struct {
	kind    string
	service string
	from    string // node of the client, "" outside
	entry   int    // node that serves the Service's address to it
}

// excuse is a time in which documents allow a loss.
type excuse struct {
	reason   string
	from, to time.Time // zero to: it lasts
	matches  func(*Loss) bool
}

// ledger counts losses and excuses them.
type ledger struct {
	mu      sync.Mutex
	start   time.Time
	flows   map[string]flowInfo
	excuses []*excuse
	losses  []*Loss // that count, and excused ones, up to keptLosses of each
	lost    int
	excused map[string]int
	byKind  map[string]*Row
	actions []begun // that may still be blamed
	closed  bool
	log     func(format string, args ...any)
	backlog backlog
}

// begun is an action that has begun.
type begun struct {
	at     time.Time
	number int
	kind   string
}

// keptLosses bounds the losses that a report names one by one, of each sort.
const keptLosses = 200

func newLedger(log func(string, ...any)) *ledger {
	return &ledger{start: time.Now(), flows: map[string]flowInfo{}, excused: map[string]int{}, byKind: map[string]*Row{}, log: log}
}

// begin notes that an action begins.
func (l *ledger) begin(number int, kind string, streams int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// A loss is reported within the patience of a question.
	if len(l.actions) > 100 {
		l.actions = slices.Delete(l.actions, 0, 50)
	}
	l.actions = append(l.actions, begun{time.Now(), number, kind})
	row := l.row(kind)
	row.Times++
	row.streams += streams
}

// took adds the time of an action that ended.
func (l *ledger) took(kind string, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.row(kind).Seconds += d.Seconds()
}

func (l *ledger) row(kind string) *Row {
	if l.byKind[kind] == nil {
		l.byKind[kind] = &Row{Action: kind}
	}
	return l.byKind[kind]
}

// allow opens an excuse, and returns a function that closes it after a further time.
func (l *ledger) allow(reason string, matches func(*Loss) bool) (done func(after time.Duration)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// A datagram that was on the way when the action began may be lost too.
	e := &excuse{reason: reason, from: time.Now().Add(-250 * time.Millisecond), matches: matches}
	l.excuses = append(l.excuses, e)
	return func(after time.Duration) {
		l.mu.Lock()
		defer l.mu.Unlock()
		e.to = time.Now().Add(after)
		if len(l.excuses) > 100 { // older ones are out of reach of any question
			l.excuses = slices.Delete(l.excuses, 0, 50)
		}
	}
}

// lose notes a loss.
func (l *ledger) lose(x Loss) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	x.At, x.flowInfo = x.at.Sub(l.start), l.flows[x.Flow]
	x.Kind = x.kind
	x.Action, x.Number = "start", 0
	for _, a := range l.actions {
		if a.at.Before(x.at) || a.number == 1 {
			x.Action, x.Number = a.kind, a.number
		}
	}
	for _, e := range l.excuses {
		end := x.at.Add(x.Took)
		over := x.Kind == keptUDP || x.Kind == sendtoUDP || x.Kind == freshUDP
		if over {
			end = x.at // a datagram is lost when it is sent, or soon after
		}
		if end.After(e.from) && (e.to.IsZero() || x.at.Before(e.to)) && e.matches(&x) {
			x.Excuse = e.reason
		}
	}
	if x.Excuse == "" && isDatagram(x.Kind) && l.backlog.droppedSince(x.at) {
		x.Excuse = excuseBacklog
	}
	row := l.row(x.Action)
	if x.Excuse != "" {
		l.excused[x.Excuse]++
		row.Excused++
	} else {
		l.lost++
		row.Lost++
	}
	l.log("%s %s", map[bool]string{true: "excused", false: "LOST"}[x.Excuse != ""], x.String())
	if l.lost <= keptLosses && x.Excuse == "" || x.Excuse != "" && l.excused[x.Excuse] <= keptLosses/4 {
		l.losses = append(l.losses, &x)
	}
}

// String describes a loss in one line.
func (x *Loss) String() string {
	text := fmt.Sprintf("%s at %s during action %d (%s): %s after %s", x.Flow, elapsed(x.At), x.Number, x.Action, x.Error,
		x.Took.Round(time.Millisecond))
	if x.Local != "" {
		text += ", from " + x.Local
	}
	if x.Server != "" {
		text += ", server " + x.Server
	}
	if isDatagram(x.Kind) {
		text += map[bool]string{true: ", next datagram answered", false: ", next datagram not answered"}[x.Again]
	}
	if x.Excuse != "" {
		text += ": " + x.Excuse
	}
	return text
}

// isDatagram reports whether one lost datagram is a loss.
func isDatagram(kind string) bool {
	return kind == freshUDP || kind == keptUDP || kind == sendtoUDP
}

// close ends the ledger: losses after it are not counted.
func (l *ledger) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

func (l *ledger) totals() (lost, excused int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.excused {
		excused += n
	}
	return l.lost, excused
}

// elapsed prints a duration as 01:02:03.
func elapsed(d time.Duration) string {
	s := int(d.Seconds())
	return fmt.Sprintf("%02d:%02d:%02d", s/3600, s/60%60, s%60)
}

// backlog remembers when CPUs dropped packets because their queue was full
// (net.core.netdev_max_backlog). All network namespaces of the machine share these
// queues, so another program's flood may cost a datagram.
type backlog struct {
	drops uint64
	at    []time.Time // of the latest growths
}

// look notes a growth. Callers hold the ledger's lock.
func (b *backlog) look() {
	text, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		return
	}
	var sum uint64
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 {
			n, _ := strconv.ParseUint(f[1], 16, 64)
			sum += n
		}
	}
	if sum > b.drops && b.drops > 0 {
		b.at = append(b.at[max(0, len(b.at)-99):], time.Now())
	}
	b.drops = max(sum, 1)
}

// droppedSince reports whether packets were dropped within two seconds of a time.
func (b *backlog) droppedSince(at time.Time) bool {
	return slices.ContainsFunc(b.at, func(t time.Time) bool { return t.Sub(at).Abs() < 2*time.Second })
}

// watch looks at the backlog until stop is closed.
func (l *ledger) watch(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(500 * time.Millisecond):
		}
		l.mu.Lock()
		l.backlog.look()
		l.mu.Unlock()
	}
}

// The documented excuses.
const (
	excuseBacklog = "a CPU's backlog overflowed on this machine"
	excuseLink    = "the link of its node was down"
	excuseAway    = "its client, entry or server was on the node that went away"
	excuseStay    = "connected UDP socket of a pod, opened before its node left eBPF (limits.md), to the node that went away"
	excuseMove    = "kept UDP socket whose endpoint was removed (drain-a-node.md)"
)

// know notes a flow's facts.
func (l *ledger) know(name string, info flowInfo) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flows[name] = info
}

func (l *ledger) flow(name string) flowInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.flows[name]
}

// forget drops the facts of a flow that has ended.
func (l *ledger) forget(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.flows, name)
}

// restart sets the start of the load.
func (l *ledger) restart() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.start = time.Now()
}
