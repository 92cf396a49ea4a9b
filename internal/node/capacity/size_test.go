package capacity

import (
	"math"
	"testing"
	"time"
)

func TestATableWithinABudgetIsTheLargestOne(t *testing.T) {
	for _, bytes := range []int64{0, 391, 392, 100_000, 1 << 20, 1 << 30, 1 << 50} {
		n := TableWithin(bytes)
		if cost := Memory(n, n, ExpectMax(n)); n > 0 && cost > bytes {
			t.Errorf("%d bytes: a table of %d takes %d", bytes, n, cost)
		}
		if cost := Memory(n+1, n+1, ExpectMax(n+1)); n < math.MaxInt32 && cost <= bytes {
			t.Errorf("%d bytes: a table of %d would fit too", bytes, n+1)
		}
	}
}

func TestSizesGoInSteps(t *testing.T) {
	for _, row := range []struct {
		name      string
		got, want int
	}{
		{"up from nothing", StepUp(0), 1},
		{"a power of two stays", StepUp(65536), 65536},
		{"just above one", StepUp(65537), 131072},
		{"no further than an int32 goes", StepUp(math.MaxInt), 1 << 30},
		{"buckets fill pages", WholeBuckets(100_000, 4096), 100_352},
		{"whole pages stay", WholeBuckets(262_144, 4096), 262_144},
		{"half of it free", TableFor(100, 0.5), 200},
		{"more than there can be", TableFor(1e18, 0.5), math.MaxInt32},
	} {
		if row.got != row.want {
			t.Errorf("%s: %d, want %d", row.name, row.got, row.want)
		}
	}
}

// flows adds the entries of n flows: each silent for i/rate seconds.
func flows(a *Ages, rate float64, forSeconds float64) {
	for i := range int(rate * forSeconds) {
		if left := a.Timeout - time.Duration(float64(i)/rate*float64(second)); left > 0 {
			a.Add(left.Truncate(second))
		}
	}
}

func TestAgesTellARateFromWhatIsLeftOfTime(t *testing.T) {
	a := Ages{Timeout: 30 * second}
	flows(&a, 100, 60)
	if !a.ShortLived() || math.Abs(a.Rate()-100) > 1 || math.Abs(a.KeptFor(10*second)-1000) > 20 || math.Abs(a.KeptFor(30*second)-a.All) > 60 {
		t.Errorf("100 flows/s: %+v, %v/s, with 10 s %v", a, a.Rate(), a.KeptFor(10*second))
	}
	if s := a.Scaled(10); !s.ShortLived() || math.Abs(s.Rate()-1000) > 10 {
		t.Errorf("a tenth of 1000 flows/s: %+v", s)
	}
	// As many again that send all the time.
	for range int(a.All) {
		a.Add(29 * second)
	}
	if math.Abs(a.KeptFor(10*second)-4000) > 40 {
		t.Errorf("with 3000 that go on: %v with 10 s, want 4000", a.KeptFor(10*second))
	}
}

func TestFlowsThatAreNotShortLivedAreToldFromThoseThatAre(t *testing.T) {
	ramp := Ages{Timeout: 30 * second}
	flows(&ramp, 100, 15)
	keepAlive := Ages{Timeout: 120 * second}
	for i := range 2000 { // a packet every 20 s
		keepAlive.Add(120*second - time.Duration(i%20+1)*second)
	}
	few := Ages{Timeout: 30 * second}
	flows(&few, 5, 60)
	older := Ages{Timeout: 10 * second}
	for i := range 3000 {
		older.Add(time.Duration(11+i%20) * second)
	}
	for name, a := range map[string]Ages{"a load that has just begun": ramp, "a packet now and then": keepAlive, "too few": few,
		"entries of an older timeout": older, "a sample of few": few.Scaled(100), "nothing": {}} {
		if a.ShortLived() || a.KeptFor(10*second) != a.All {
			t.Errorf("%s: %+v counts as short-lived", name, a)
		}
	}
}
