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
	"spillway.dev/spillway/internal/node/conntrack"
)

// The managed sysctls. The sizes are global, and writable
// only in the initial network namespace; the timeouts are per namespace.
const (
	sizeMax       = conntrack.SysctlMax
	sizeBuckets   = conntrack.SysctlBuckets
	sizeExpectMax = conntrack.SysctlExpectMax

	timeoutUDP       = conntrack.SysctlUDP
	timeoutUDPStream = conntrack.SysctlUDPStream
	timeoutTimeWait  = conntrack.SysctlTimeWait
	timeoutFinWait   = conntrack.SysctlFinWait
)

// shortest holds the timeouts that may be shortened and their minimum in seconds. With
// these, a resolver that retries after 5 s finds the entry of its first query. A lost FIN
// is retransmitted in time (RFC 6298: at most some seconds). A stream with a packet every
// 15 s, such as QUIC's keepalive, stays.
var shortest = map[string]int{
	timeoutUDP: 10, timeoutUDPStream: 20, timeoutTimeWait: 20, timeoutFinWait: 30,
}

// Thresholds of the decisions. Between calmBelow and fullAbove nothing changes, so that
// noise has no effect.
const (
	fullAbove = 0.75 // share of a table above which it counts as too full
	aimFor    = 0.5  // share of a table that a change aims for
	calmBelow = 0.5  // share of the found values below which they are enough again
	// horizon is the time for which growth is extrapolated: some readings.
	horizon = 30 * time.Second
	// Calm is the calm period before a value is restored.
	Calm = 5 * time.Minute
	// worthwhile is the smallest share of a namespace's need for which a timeout is
	// shortened.
	worthwhile = 0.05
)

// setting names one value.
type setting struct {
	Netns  uint64 `json:"netns,omitempty"` // the namespace's cookie; 0: global
	Sysctl string `json:"sysctl"`
}

// space is one network namespace as measured.
type space struct {
	Netns        uint64
	Own          bool // the agent's
	Name         string
	Entries      int
	Growth       float64                  // entries per second; negative: shrinking
	Expectations int                      // current number
	Timeouts     map[string]int           // current, in seconds; nil if not needed
	Ages         map[string]capacity.Ages // of the entries of each timeout
}

// measured is the machine at one moment.
type measured struct {
	At                      time.Time
	Max, Buckets, ExpectMax int
	Spaces                  []space
}

// bounds are the limits of decisions.
type bounds struct {
	Memory    int64            // largest size of a full table, in bytes
	Entries   int              // configured minimum of the table size
	Timeouts  map[string]int   // configured minimum, in seconds
	PageBytes int              // the kernel's page size
	Fixed     map[setting]bool // values that cannot be written
}

// record is a changed value.
type record struct {
	Found int `json:"found"` // before the first change
	Set   int `json:"set"`   // by the last one
	// Settled is the time at which no entry with the previous timeout is left.
	Settled time.Time `json:"settled,omitzero"`
}

// memory is the state between decisions. Only Records outlive the process.
type memory struct {
	Records map[setting]record
	calm    map[setting]time.Time     // since when
	ages    map[setting]capacity.Ages // before a timeout changed
}

// newMemory returns a memory with the changes of a previous agent.
func newMemory(records map[setting]record) *memory {
	m := &memory{Records: records, calm: map[setting]time.Time{}, ages: map[setting]capacity.Ages{}}
	if m.Records == nil {
		m.Records = map[setting]record{}
	}
	return m
}

// step is one change.
type step struct {
	setting
	Space    string // name of the namespace; "" for global values
	From, To int
	Back     bool // restores the value found at the start
	Why      string
}

// note records a step that is carried out at now.
func (m *memory) note(s step, now time.Time) {
	delete(m.calm, s.setting)
	if s.Back {
		delete(m.Records, s.setting)
		return
	}
	r, changed := m.Records[s.setting]
	if !changed {
		r.Found = s.From
	}
	r.Set = s.To
	if s.Netns != 0 {
		r.Settled = now.Add(time.Duration(max(s.From, s.To)) * time.Second)
	}
	m.Records[s.setting] = r
}

// reconcile forgets changes that are no longer in effect: another program or an operator
// has set another value, which stays, or the namespace is gone.
func (m *memory) reconcile(now map[setting]int) {
	maps.DeleteFunc(m.Records, func(s setting, r record) bool {
		v, there := now[s]
		return !there || v != r.Set
	})
	maps.DeleteFunc(m.ages, func(s setting, _ capacity.Ages) bool { _, there := m.Records[s]; return !there })
	maps.DeleteFunc(m.calm, func(s setting, _ time.Time) bool { _, there := m.Records[s]; return !there })
}

// need is the need of one namespace, in entries.
type need struct {
	*space
	long  float64            // in the long run, with the timeouts found at the start
	peak  float64            // including the growth until the horizon
	short map[string]float64 // flows per second, by timeouts with short-lived flows
}

// decide returns the changes to make now. It updates the calm periods and rates in mem;
// the caller records the changes that it makes with note.
func decide(m measured, mem *memory, b bounds) []step {
	d := &decision{measured: m, mem: mem, bounds: b, within: capacity.TableWithin(b.Memory)}
	for i := range m.Spaces {
		n := d.need(&m.Spaces[i])
		d.needs = append(d.needs, n)
		d.growing += n.peak
		d.fullest = max(d.fullest, n.peak)
		if n.Own {
			d.own = n.peak
		}
	}
	d.sizes()
	d.timeouts()
	return d.steps
}

type decision struct {
	measured
	mem     *memory
	bounds  bounds
	within  int // entries that fit into the memory
	needs   []need
	growing float64
	fullest float64 // needed by the fullest namespace
	own     float64 // needed by the agent's namespace
	max     int     // nf_conntrack_max after the steps
	steps   []step
}

func (d *decision) need(s *space) need {
	n := need{space: s, long: float64(s.Entries), short: map[string]float64{}}
	for sysctl := range shortest {
		a, known := d.ages(s, sysctl)
		now, isMeasured := s.Ages[sysctl]
		if !known || !isMeasured || !a.ShortLived() {
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

// ages returns the Ages of a timeout's entries. While entries with its previous value
// exist, which cannot be distinguished, it returns the Ages from before the change.
func (d *decision) ages(s *space, sysctl string) (capacity.Ages, bool) {
	set := setting{s.Netns, sysctl}
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

// found returns the value of a timeout at the start.
func (d *decision) found(s *space, sysctl string) time.Duration {
	v := s.Timeouts[sysctl]
	if r, changed := d.mem.Records[setting{s.Netns, sysctl}]; changed {
		v = r.Found
	}
	return time.Duration(v) * time.Second
}

// sizes decides on the global values, buckets first: entries without buckets make long
// chains.
func (d *decision) sizes() {
	others := 0
	if rest := int(d.growing - d.fullest); rest > 0 {
		others = capacity.StepUp(rest)
	}
	available := max(d.within-others, 0)
	wanted := d.Max
	why := fmt.Sprintf("the fullest network namespace needs %.0f entries", d.fullest)
	if d.fullest > fullAbove*float64(d.Max) {
		wanted = min(capacity.StepUp(capacity.TableFor(d.fullest, 1-aimFor)), available)
	}
	if d.own > fullAbove*float64(d.Max) { // others do not take the half of the memory from it
		wanted = max(wanted, min(capacity.StepUp(capacity.TableFor(d.own, 1-aimFor)), d.within/2))
	}
	gain := d.Max / 8
	if floor := min(d.bounds.Entries, d.within); floor > wanted {
		gain, wanted, why = 0, floor, "--conntrack-max-per-core and --conntrack-min require it"
	}
	d.max = d.Max
	buckets := d.Buckets
	if all := d.growing; all > fullAbove*float64(d.Buckets) {
		buckets = d.wholeBuckets(capacity.StepUp(capacity.TableFor(all, 1-aimFor)))
	}
	if wanted > d.Max {
		buckets = max(buckets, d.wholeBuckets(wanted/4)) // chains of four at most, in a full table
	}
	raised := d.raise(sizeBuckets, d.Buckets, buckets, d.Buckets/8, fmt.Sprintf("all network namespaces need %.0f entries", d.growing))
	if d.raise(sizeMax, d.Max, wanted, gain, why) {
		d.max = wanted
	}
	if !raised {
		buckets = d.Buckets
	}
	d.expectations(buckets)
	d.lower(sizeMax, d.Max, d.fullest, d.bounds.Entries)
	d.lower(sizeBuckets, d.Buckets, d.growing, 0)
}

// wholeBuckets returns the number of buckets that the kernel allocates for n, within the
// memory.
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
		wanted = max(wanted, capacity.ExpectMax(buckets)) // the kernel's default for the buckets
	}
	if most > fullAbove*float64(d.ExpectMax) {
		wanted = max(wanted, capacity.StepUp(capacity.TableFor(most, 1-aimFor)))
	}
	wanted = min(wanted, max(capacity.ExpectMax(d.within), d.ExpectMax))
	d.raise(sizeExpectMax, d.ExpectMax, wanted, d.ExpectMax/8, fmt.Sprintf("%.0f expectations exist, and there are %d buckets", most, buckets))
	// Expectations follow the rate, as buckets do.
	d.lower(sizeExpectMax, d.ExpectMax, most, 0)
}

// raise raises a global value if the difference is at least gain.
func (d *decision) raise(sysctl string, from, to, gain int, why string) bool {
	set := setting{Sysctl: sysctl}
	if to <= from || to-from < gain || d.bounds.Fixed[set] {
		return false
	}
	d.steps = append(d.steps, step{setting: set, From: from, To: to, Why: why})
	return true
}

// lower restores the found value of a global setting, or sets least, once that has been
// enough for Calm.
func (d *decision) lower(sysctl string, now int, need float64, least int) {
	set := setting{Sysctl: sysctl}
	r, changed := d.mem.Records[set]
	to := max(r.Found, min(least, d.within))
	if !changed || to >= now || !d.calm(set, need < calmBelow*float64(to)) {
		return
	}
	d.steps = append(d.steps, step{setting: set, From: now, To: to, Back: to == r.Found,
		Why: fmt.Sprintf("%.0f have been enough for %v", need, Calm)})
}

// calm reports whether a setting has been calm for Calm. now says whether it is calm now.
func (d *decision) calm(s setting, now bool) bool {
	if !now {
		delete(d.mem.calm, s)
		return false
	}
	since, wasCalm := d.mem.calm[s]
	if !wasCalm {
		d.mem.calm[s], since = d.At, d.At
	}
	return d.At.Sub(since) >= Calm && !d.bounds.Fixed[s]
}

// share returns the entries that the memory has for the agent's namespace and for each other one,
// if each wants so much that its need is part of it. A pod makes as many namespaces as it likes, and
// sets their timeouts. So the agent's has half of the memory, or what the others leave. These have
// equal shares, and what smaller ones leave.
func (d *decision) share(part float64) (own, other float64) {
	sum, mine := 0.0, 0.0
	var wants []float64
	for _, n := range d.needs {
		if n.Own {
			mine = n.long / part
			continue
		}
		wants = append(wants, n.long/part)
		sum += n.long / part
	}
	own = max(float64(d.within)/2, float64(d.within)-sum)
	left := float64(d.within) - min(mine, own)
	slices.Sort(wants)
	for i, want := range wants {
		if other = left / float64(len(wants)-i); want >= other {
			return own, other
		}
		left -= want
	}
	return own, math.Inf(1)
}

// timeouts decides on the timeouts of all namespaces.
func (d *decision) timeouts() {
	ownFull, full := d.share(fullAbove)
	ownCalm, calm := d.share(calmBelow)
	for _, n := range d.needs {
		limit, calmLimit := min(float64(d.max), full), min(float64(d.max), calm)
		if n.Own {
			limit, calmLimit = min(float64(d.max), ownFull), min(float64(d.max), ownCalm)
		}
		if n.long > fullAbove*limit {
			d.shorten(n, limit)
		} else {
			d.lengthen(n, calmLimit)
		}
	}
}

// shorten halves the timeouts of short-lived flows until the namespace's need meets the
// aim, or until their minimum.
func (d *decision) shorten(n need, limit float64) {
	silent := 0.0 // entries of ended flows
	for sysctl, rate := range n.short {
		delete(d.mem.calm, setting{n.Netns, sysctl})
		silent += rate * d.found(n.space, sysctl).Seconds()
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
		set := setting{n.Netns, sysctl}
		now, found := n.Timeouts[sysctl], int(d.found(n.space, sysctl).Seconds())
		to := max(found>>halves, shortest[sysctl], d.bounds.Timeouts[sysctl])
		r := d.mem.Records[set]
		if to >= now || n.short[sysctl]*float64(found) < worthwhile*n.long || d.bounds.Fixed[set] || d.At.Before(r.Settled) {
			continue
		}
		d.steps = append(d.steps, step{setting: set, Space: n.Name, From: now, To: to,
			Why: fmt.Sprintf("%.0f short-lived flows/s need %.0f entries and %.0f fit", n.short[sysctl], n.long, limit)})
	}
}

// lengthen restores the found timeouts once the table has had space for them for Calm.
func (d *decision) lengthen(n need, limit float64) {
	for _, sysctl := range slices.Sorted(maps.Keys(shortest)) {
		set := setting{n.Netns, sysctl}
		r, changed := d.mem.Records[set]
		if !changed || d.At.Before(r.Settled) || !d.calm(set, n.long < calmBelow*limit) {
			continue
		}
		d.steps = append(d.steps, step{setting: set, Space: n.Name, From: n.Timeouts[sysctl], To: r.Found, Back: true,
			Why: fmt.Sprintf("%.0f entries of %.0f have been enough for %v", n.long, limit, Calm)})
	}
}

// String formats a step as "nf_conntrack_max 262144 -> 524288".
func (s step) String() string {
	where := ""
	if s.Space != "" {
		where = " of " + s.Space
	}
	return fmt.Sprintf("%s%s %d -> %d", s.Sysctl, where, s.From, s.To)
}

// direction returns the direction of a step: "raise", "shorten" or "back".
func (s step) direction() string {
	switch {
	case s.Back || s.Netns == 0 && s.To < s.From:
		return "back"
	case cmp.Less(s.To, s.From):
		return "shorten"
	}
	return "raise"
}
