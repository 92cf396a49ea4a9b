package capacity

import (
	"math"
	"math/bits"
	"time"
)

// TableFor is the smallest table in which so many entries leave a part of it
// free, headRoom, from 0 to less than 1.
func TableFor(entries, headRoom float64) int {
	n := math.Ceil(entries / (1 - headRoom))
	return int(min(max(n, 0), math.MaxInt32))
}

// TableWithin is the largest table that takes no more than so many bytes when it
// is full, with a bucket for each entry and as many expectations as come with
// these.
func TableWithin(bytes int64) int {
	lo, hi := int64(0), min(max(bytes, 0)/(EntryBytes+BucketBytes), math.MaxInt32)
	for lo < hi {
		mid := (lo + hi + 1) / 2
		if Memory(int(mid), int(mid), ExpectMax(int(mid))) <= bytes {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return int(lo)
}

// StepUp rounds up to a power of two, at most 2^30. Sizes that follow a
// measurement go in such steps, so that its noise does not move them.
func StepUp(n int) int {
	if n <= 1 {
		return 1
	}
	return 1 << min(bits.Len(uint(n-1)), 30)
}

// WholeBuckets rounds a number of buckets up to whole pages, as the kernel does
// (nf_ct_alloc_hashtable).
func WholeBuckets(n, pageBytes int) int {
	page := pageBytes / BucketBytes
	return (n + page - 1) / page * page
}

// AgeWindow is the time by which Ages tells old packets from new ones.
const AgeWindow = 3 * time.Second

// shortLivedSample is the least number of entries that say anything of how long
// flows live.
const shortLivedSample = 30

// Ages says how long ago entries that share a time-out saw their last packet.
// The kernel has no counter of new entries, but each remaining time tells the
// age of a packet. Entries that run on an older, longer time-out count in All
// alone.
type Ages struct {
	Timeout time.Duration
	All     float64
	Fresh   float64 // less than an AgeWindow ago
	Early   float64 // in the AgeWindow before that
	Late    float64 // in the last AgeWindow before they are forgotten
	Scale   float64 // what one entry that was looked at stands for; 0: one
}

// Add counts one entry by the time that it has left, whole seconds rounded down
// as the kernel gives it.
func (a *Ages) Add(left time.Duration) {
	a.All++
	switch {
	case left > a.Timeout:
		return
	case left >= a.Timeout-AgeWindow:
		a.Fresh++
	case left >= a.Timeout-2*AgeWindow:
		a.Early++
	}
	if left < AgeWindow {
		a.Late++
	}
}

// Scaled is a sample's Ages for the whole, of which every entry that was looked
// at stands for so many.
func (a Ages) Scaled(by float64) Ages {
	return Ages{Timeout: a.Timeout, All: a.All * by, Fresh: a.Fresh * by, Early: a.Early * by, Late: a.Late * by, Scale: by}
}

// Rate is how many flows a second fall silent; under a constant load as many
// begin.
func (a Ages) Rate() float64 { return a.Early / AgeWindow.Seconds() }

// ShortLived reports whether flows that have been silent for a moment stay so
// until they are forgotten. Of flows that come back, fewer entries are about to
// be forgotten than have just fallen silent; so it looks, too, for the first
// Timeout of a load, when nothing is old yet. Too few entries say nothing.
func (a Ages) ShortLived() bool {
	if a.Timeout < 3*AgeWindow || a.Early < shortLivedSample*max(a.Scale, 1) {
		return false
	}
	return a.Late >= a.Early/2
}

// KeptFor is how many entries there would be with another time-out, in the long
// run: those of flows that are under way, and of short-lived ones what Little's
// law says. Of other flows nobody knows, and they stay as many.
func (a Ages) KeptFor(timeout time.Duration) float64 {
	if !a.ShortLived() {
		return a.All
	}
	return a.UnderWay() + a.Rate()*timeout.Seconds()
}

// UnderWay is how many of the fresh entries are of flows that go on.
func (a Ages) UnderWay() float64 { return max(0, a.Fresh-a.Early) }
