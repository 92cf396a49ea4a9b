package autopilot

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"time"

	"spillway.dev/spillway/internal/node/capacity"
)

// Names of the sysctls below net.netfilter that the autopilot looks after. The
// sizes are the machine's, and writable only in its first network namespace; the
// time-outs are each namespace's own.
const (
	sizeMax       = "nf_conntrack_max"
	sizeBuckets   = "nf_conntrack_buckets"
	sizeExpectMax = "nf_conntrack_expect_max"

	timeoutUDP       = "nf_conntrack_udp_timeout"
	timeoutUDPStream = "nf_conntrack_udp_timeout_stream"
	timeoutTimeWait  = "nf_conntrack_tcp_timeout_time_wait"
	timeoutFinWait   = "nf_conntrack_tcp_timeout_fin_wait"
)

// shortest are the time-outs that may be shortened, in seconds, and how far: a
// resolver that asks a second time after 5 s finds its first question's entry, a
// FIN that was lost is sent again in time (RFC 6298: at most some seconds), and
// a stream of one packet every 15 s, as QUIC keeps one alive, goes on.
var shortest = map[string]int{
	timeoutUDP: 10, timeoutUDPStream: 20, timeoutTimeWait: 20, timeoutFinWait: 30,
}

// The decisions' thresholds. Between calmBelow and fullAbove nothing happens, so
// that noise does not.
const (
	fullAbove = 0.75 // of a table: less head-room than this is too little
	aimFor    = 0.5  // how full a table is that was changed
	calmBelow = 0.5  // of the values found at the start: they would do again
	// horizon is how far growth is looked ahead: some readings.
	horizon = 30 * time.Second
	// Calm is how long it has to be calm before a value goes back.
	Calm = 5 * time.Minute
	// worthwhile is the least part of a namespace's need that shortening a
	// time-out is tried for.
	worthwhile = 0.05
)

// Setting names one value.
type Setting struct {
	Netns  uint64 `json:"netns,omitempty"` // the namespace's cookie; 0: the machine's
	Sysctl string `json:"sysctl"`
}

// Space is one network namespace as measured.
type Space struct {
	Netns        uint64
	Name         string
	Entries      int
	Growth       float64                  // entries a second; below 0 it shrinks
	Expectations int                      // waiting now
	Timeouts     map[string]int           // seconds now; missing where nothing asks for them
	Ages         map[string]capacity.Ages // of the entries on each time-out
}

// Measured is the machine at one moment.
type Measured struct {
	At                      time.Time
	Max, Buckets, ExpectMax int
	Spaces                  []Space
}

// Bounds are what the decisions keep to.
type Bounds struct {
	Memory    int64            // bytes that a full table may take
	Entries   int              // the table that the operator asked for: never less than this
	Timeouts  map[string]int   // seconds: never shorter than these
	PageBytes int              // the kernel's pages
	Fixed     map[Setting]bool // values that cannot be written
}

// Record is a value that was changed.
type Record struct {
	Found int `json:"found"` // before the first change
	Set   int `json:"set"`   // by the last one
	// Settled is when no entry of the former time-out is left.
	Settled time.Time `json:"settled,omitzero"`
}

// Memory is what decisions remember from one moment to the next. Only Records
// outlive the process.
type Memory struct {
	Records map[Setting]Record
	calm    map[Setting]time.Time     // since when
	ages    map[Setting]capacity.Ages // as they were before a time-out changed
}

// NewMemory is a Memory with the changes of an agent before this one.
func NewMemory(records map[Setting]Record) *Memory {
	m := &Memory{Records: records, calm: map[Setting]time.Time{}, ages: map[Setting]capacity.Ages{}}
	if m.Records == nil {
		m.Records = map[Setting]Record{}
	}
	return m
}

// Step is one change.
type Step struct {
	Setting
	Space    string // what people call the namespace; "" for the machine's values
	From, To int
	Back     bool // to the value found at the start
	Why      string
}

// Take notes that a step is about to be done, at a moment.
func (m *Memory) Take(s Step, now time.Time) {
	delete(m.calm, s.Setting)
	if s.Back {
		delete(m.Records, s.Setting)
		return
	}
	r, changed := m.Records[s.Setting]
	if !changed {
		r.Found = s.From
	}
	r.Set = s.To
	if s.Netns != 0 {
		r.Settled = now.Add(time.Duration(max(s.From, s.To)) * time.Second)
	}
	m.Records[s.Setting] = r
}

// Reconcile forgets changes that are no longer there: somebody else has set
// another value since, which is an operator's and stays, or the namespace is gone.
func (m *Memory) Reconcile(now map[Setting]int) {
	maps.DeleteFunc(m.Records, func(s Setting, r Record) bool {
		v, there := now[s]
		return !there || v != r.Set
	})
	maps.DeleteFunc(m.ages, func(s Setting, _ capacity.Ages) bool { _, there := m.Records[s]; return !there })
}

// need is what one namespace needs, in entries.
type need struct {
	*Space
	long  float64            // in the long run, with the time-outs found at the start
	peak  float64            // with what it grows by until the horizon
	short map[string]float64 // flows a second, of those time-outs whose flows are short-lived
}

// Decide says what is to be changed now. It changes only what mem remembers of
// calm moments and of rates; the caller notes by Take what it does.
func Decide(m Measured, mem *Memory, b Bounds) []Step {
	d := &decision{Measured: m, mem: mem, bounds: b, within: capacity.TableWithin(b.Memory)}
	for i := range m.Spaces {
		n := d.need(&m.Spaces[i])
		d.needs = append(d.needs, n)
		d.total += n.long
		d.growing += n.peak
		d.fullest = max(d.fullest, n.peak)
	}
	d.sizes()
	for _, n := range d.needs {
		d.timeouts(n)
	}
	return d.steps
}

type decision struct {
	Measured
	mem     *Memory
	bounds  Bounds
	within  int // entries that the memory allows
	needs   []need
	total   float64 // entries needed by all namespaces
	growing float64
	fullest float64 // by the one that needs most
	max     int     // nf_conntrack_max after this
	steps   []Step
}

func (d *decision) need(s *Space) need {
	n := need{Space: s, long: float64(s.Entries), short: map[string]float64{}}
	for sysctl := range shortest {
		a, known := d.ages(s, sysctl)
		now, measured := s.Ages[sysctl]
		if !known || !measured || !a.ShortLived() {
			continue
		}
		n.short[sysctl] = a.Rate()
		n.long += a.KeptFor(d.found(s, sysctl)) - now.All
	}
	n.long = max(n.long, 0)
	n.peak = n.long
	if s.Growth > 0 {
		n.peak = max(n.long, float64(s.Entries)+s.Growth*horizon.Seconds())
	}
	return n
}

// ages are those of a time-out's entries; while entries of its former value are
// about, which look like others, those from before the change.
func (d *decision) ages(s *Space, sysctl string) (capacity.Ages, bool) {
	set := Setting{s.Netns, sysctl}
	a, ok := s.Ages[sysctl]
	if r, changed := d.mem.Records[set]; changed && d.At.Before(r.Settled) {
		before, known := d.mem.ages[set]
		return before, known
	}
	if ok {
		d.mem.ages[set] = a
	}
	return a, ok
}

// found is a time-out as it was at the start.
func (d *decision) found(s *Space, sysctl string) time.Duration {
	v := s.Timeouts[sysctl]
	if r, changed := d.mem.Records[Setting{s.Netns, sysctl}]; changed {
		v = r.Found
	}
	return time.Duration(v) * time.Second
}

// sizes decides on the machine's values, buckets first: entries without buckets
// make long chains.
func (d *decision) sizes() {
	others := 0
	if rest := int(d.growing - d.fullest); rest > 0 {
		others = capacity.StepUp(rest)
	}
	room := max(d.within-others, 0)
	wanted := d.Max
	why := fmt.Sprintf("the fullest network namespace needs %.0f entries", d.fullest)
	if d.fullest > fullAbove*float64(d.Max) {
		wanted = min(capacity.StepUp(capacity.TableFor(d.fullest, 1-aimFor)), room)
	}
	gain := d.Max / 8
	if floor := min(d.bounds.Entries, d.within); floor > wanted {
		gain, wanted, why = 0, floor, "asked for by --conntrack-max-per-core and --conntrack-min"
	}
	d.max = d.Max
	buckets := d.Buckets
	if all := d.growing; all > fullAbove*float64(d.Buckets) {
		buckets = d.wholeBuckets(capacity.StepUp(capacity.TableFor(all, 1-aimFor)))
	}
	if wanted > d.Max {
		buckets = max(buckets, d.wholeBuckets(wanted/4)) // chains of four at most, in a full table
	}
	grown := d.grow(sizeBuckets, d.Buckets, buckets, d.Buckets/8, fmt.Sprintf("all network namespaces need %.0f entries", d.growing))
	if d.grow(sizeMax, d.Max, wanted, gain, why) {
		d.max = wanted
	}
	if !grown {
		buckets = d.Buckets
	}
	d.expectations(buckets)
	d.shrink(sizeMax, d.Max, d.fullest, d.bounds.Entries)
	d.shrink(sizeBuckets, d.Buckets, d.growing, 0)
}

// wholeBuckets are as many as the kernel makes of n, within the memory.
func (d *decision) wholeBuckets(n int) int {
	page := max(d.bounds.PageBytes, capacity.BucketBytes)
	n = capacity.WholeBuckets(min(n, d.within), page)
	if n > d.within {
		n -= page / capacity.BucketBytes
	}
	return n
}

func (d *decision) expectations(buckets int) {
	most := 0.0
	for _, n := range d.needs {
		most = max(most, float64(n.Expectations))
	}
	wanted := d.ExpectMax
	if buckets > d.Buckets {
		wanted = max(wanted, capacity.ExpectMax(buckets)) // as the kernel would have begun with
	}
	if most > fullAbove*float64(d.ExpectMax) {
		wanted = max(wanted, capacity.StepUp(capacity.TableFor(most, 1-aimFor)))
	}
	wanted = min(wanted, max(capacity.ExpectMax(d.within), d.ExpectMax))
	d.grow(sizeExpectMax, d.ExpectMax, wanted, d.ExpectMax/8, fmt.Sprintf("%.0f expectations wait, and there are %d buckets", most, buckets))
	// Rate × wait: the load that needed them needs buckets too.
	d.shrink(sizeExpectMax, d.ExpectMax, most, 0)
}

// grow raises one of the machine's values, if that gains so much at least.
func (d *decision) grow(sysctl string, from, to, gain int, why string) bool {
	set := Setting{Sysctl: sysctl}
	if to <= from || to-from < gain || d.bounds.Fixed[set] {
		return false
	}
	d.steps = append(d.steps, Step{Setting: set, From: from, To: to, Why: why})
	return true
}

// shrink takes one of the machine's values back to what was found, or to least,
// once that has been enough for a while.
func (d *decision) shrink(sysctl string, now int, need float64, least int) {
	set := Setting{Sysctl: sysctl}
	r, changed := d.mem.Records[set]
	to := max(r.Found, min(least, d.within))
	if !changed || to >= now || !d.calm(set, need < calmBelow*float64(to)) {
		return
	}
	d.steps = append(d.steps, Step{Setting: set, From: now, To: to, Back: to == r.Found, Why: fmt.Sprintf("%.0f have been enough for %v", need, Calm)})
}

// calm reports whether it has been calm for long enough.
func (d *decision) calm(s Setting, now bool) bool {
	if !now {
		delete(d.mem.calm, s)
		return false
	}
	since, was := d.mem.calm[s]
	if !was {
		d.mem.calm[s], since = d.At, d.At
	}
	return d.At.Sub(since) >= Calm && !d.bounds.Fixed[s]
}

// timeouts decides on those of one namespace.
func (d *decision) timeouts(n need) {
	// Memory is shared: each namespace has as large a part as of the need.
	limit := min(float64(d.max), max(n.long, 1)*float64(d.within)/max(d.total, 1))
	if n.long > fullAbove*limit {
		d.shorten(n, limit)
	} else {
		d.lengthen(n, limit)
	}
}

// shorten shortens the time-outs of short-lived flows by so many halves that the
// namespace's need is what is aimed for, or as far as it goes.
func (d *decision) shorten(n need, limit float64) {
	silent := 0.0 // entries that only wait for their time-out
	for sysctl, rate := range n.short {
		delete(d.mem.calm, Setting{n.Netns, sysctl})
		silent += rate * d.found(n.Space, sysctl).Seconds()
	}
	if silent <= 0 {
		return
	}
	part := (aimFor*limit - (n.long - silent)) / silent
	halves := 6
	if part > 1.0/64 {
		halves = bits.Len(uint(math.Ceil(1/part)) - 1)
	}
	for _, sysctl := range slices.Sorted(maps.Keys(n.short)) {
		set := Setting{n.Netns, sysctl}
		now, found := n.Timeouts[sysctl], int(d.found(n.Space, sysctl).Seconds())
		to := max(found>>halves, shortest[sysctl], d.bounds.Timeouts[sysctl])
		r := d.mem.Records[set]
		if to >= now || n.short[sysctl]*float64(found) < worthwhile*n.long || d.bounds.Fixed[set] || d.At.Before(r.Settled) {
			continue
		}
		d.steps = append(d.steps, Step{Setting: set, Space: n.Name, From: now, To: to,
			Why: fmt.Sprintf("%.0f short-lived flows/s need %.0f entries and %.0f fit", n.short[sysctl], n.long, limit)})
	}
}

// lengthen takes time-outs back to what was found, once there has been room for
// that for a while.
func (d *decision) lengthen(n need, limit float64) {
	for _, sysctl := range slices.Sorted(maps.Keys(shortest)) {
		set := Setting{n.Netns, sysctl}
		r, changed := d.mem.Records[set]
		if !changed || d.At.Before(r.Settled) || !d.calm(set, n.long < calmBelow*limit) {
			continue
		}
		d.steps = append(d.steps, Step{Setting: set, Space: n.Name, From: n.Timeouts[sysctl], To: r.Found, Back: true,
			Why: fmt.Sprintf("%.0f entries of %.0f have been enough for %v", n.long, limit, Calm)})
	}
}

// String writes a step as "nf_conntrack_max 262144 -> 524288".
func (s Step) String() string {
	where := ""
	if s.Space != "" {
		where = " of " + s.Space
	}
	return fmt.Sprintf("%s%s %d -> %d", s.Sysctl, where, s.From, s.To)
}

// Direction is what a step does: "raise", "shorten" or "back".
func (s Step) Direction() string {
	switch {
	case s.Back || s.Netns == 0 && s.To < s.From:
		return "back"
	case cmp.Less(s.To, s.From):
		return "shorten"
	}
	return "raise"
}
