package capacity

import (
	"math"
	"math/bits"
	"time"
)

// TableFor returns the size of the smallest table in which the entries leave the part
// headroom free. headroom is from 0 to less than 1.
func TableFor(entries, headroom float64) int {
	n := math.Ceil(entries / (1 - headroom))
	return int(min(max(n, 0), math.MaxInt32))
}

// TableWithin returns the size of the largest table that takes at most bytes when it is
// full. It has one bucket per entry and the kernel's number of expectations for them.
func TableWithin(bytes int64) int {
	lo, hi := int64(0), min(max(bytes, 0)/(entryBytes+BucketBytes), math.MaxInt32)
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

// StepUp rounds up to a power of two, at most 2^30. Sizes that follow a measurement
// change in such steps, so that noise does not change them.
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

// AgeWindow is the unit by which Ages distinguishes old packets from new ones.
const AgeWindow = 3 * time.Second

// shortLivedSample is the smallest number of entries that indicates the lifetime of
// flows.
const shortLivedSample = 30

// Ages counts entries of one timeout by the age of their last packet. The kernel has no
// counter of new entries, but the remaining time of an entry gives the age of its last
// packet. Entries that still run on an older, longer timeout count only in All.
type Ages struct {
	Timeout time.Duration
	All     float64
	Fresh   float64 // less than an AgeWindow ago
	Early   float64 // in the AgeWindow before that
	Late    float64 // in the last AgeWindow before they expire
	Scale   float64 // number of entries that one sampled entry stands for; 0: one
}

// Add counts one entry by its remaining time, in whole seconds rounded down, as the
// kernel reports it.
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

// Scaled extrapolates the Ages of a sample: each sampled entry stands for by entries.
func (a Ages) Scaled(by float64) Ages {
	return Ages{Timeout: a.Timeout, All: a.All * by, Fresh: a.Fresh * by, Early: a.Early * by, Late: a.Late * by, Scale: by}
}

// Rate returns the flows per second that become silent. Under a constant load the same
// number starts.
func (a Ages) Rate() float64 { return a.Early / AgeWindow.Seconds() }

// ShortLived reports whether flows that have become silent stay silent until their
// entries expire. If flows resume, fewer entries are about to expire than have just
// become silent. The same holds during the first Timeout of a load, when no entry is old
// yet. It is false for too few entries.
func (a Ages) ShortLived() bool {
	if a.Timeout < 3*AgeWindow || a.Early < shortLivedSample*max(a.Scale, 1) {
		return false
	}
	return a.Late >= a.Early/2
}

// KeptFor returns the number of entries with another timeout, in the long run: active
// flows, plus short-lived flows by Little's law. For other flows there is no estimate,
// and the number stays the same.
func (a Ages) KeptFor(timeout time.Duration) float64 {
	if !a.ShortLived() {
		return a.All
	}
	return a.underWay() + a.Rate()*timeout.Seconds()
}

// underWay returns the number of fresh entries whose flows are still active.
func (a Ages) underWay() float64 { return max(0, a.Fresh-a.Early) }
