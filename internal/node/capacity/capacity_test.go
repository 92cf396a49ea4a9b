package capacity

import (
	"math"
	"testing"
	"time"
)

const second = time.Second

func TestCeilingsAreThePublishedOnes(t *testing.T) {
	for _, row := range []struct {
		name    string
		entries int
		timeout time.Duration
		want    float64
	}{
		{"128k entries, 120 s", 128 << 10, 120 * second, 1092},
		{"512k entries, 120 s", 512 << 10, 120 * second, 4369},
	} {
		got, err := ceilingOf(row.entries, TCPClosed, 0, Timeouts{TCPTimeWait: row.timeout})
		if err != nil || math.Floor(got) != row.want {
			t.Errorf("%s: %.1f connections/s, want %v: %v", row.name, got, row.want, err)
		}
	}
}

// Published: about 200,000 entries at 5,100 transfers/s with timeouts of 10 and 20 s.
// That kernel gave an answered flow the longer timeout at once. With two entries for each
// transfer, 153,000 are alive. Expired entries stay in the count until the kernel removes
// them. No entry stays longer than 20 s and a sweep, so 204,000 is two full timeouts. The
// published figure is between the two.
func TestTFTPIsTwoEntriesAndOneExpectationATransfer(t *testing.T) {
	old := Timeouts{UDP: 10 * second, UDPStream: 20 * second, UDPStreamAt: -1}
	kept, err := keptFor(TFTP, 0, old)
	if err != nil || len(kept) != 2 || kept[0] != 10*second || kept[1] != 20*second {
		t.Fatalf("kept %v, want 10 s and 20 s: %v", kept, err)
	}
	low, _ := entriesOf([]Load{{Kind: TFTP, Rate: 5100}}, old)
	high, _ := entriesOf([]Load{{Kind: TFTP, Rate: 5100}}, Timeouts{UDP: 20 * second, UDPStream: 20 * second})
	if low != 153000 || high != 204000 {
		t.Errorf("between %v and %v entries, want 153000 and 204000", low, high)
	}
	if n := expectationsOf(5100, tftpHelper, 100*time.Millisecond, 0); n != 510 {
		t.Errorf("%v expectations wait at 100 ms, want 510", n)
	}
	if n := expectationsOf(100, tftpHelper, 0, 0.5); n != 15000 {
		t.Errorf("%v expectations with half the transfers lost, want 15000", n)
	}
}

func TestEntriesAreRateTimesTheTimeTheyAreKept(t *testing.T) {
	for _, row := range []struct {
		kind Kind
		life time.Duration
		want float64 // at 10 connections/s
	}{
		{UDPUnanswered, 0, 300},
		{UDPAnswered, second, 310},
		{UDPAnswered, 3 * second, 1230},
		{TCPClosed, second, 1210},
		{TCPReset, second, 110},
		{TCPUnanswered, 0, 1200},
		{TCPIdle, 0, 4320000},
		{ICMPEcho, 0, 300},
		{TFTP, second, 610},
	} {
		got, err := entriesOf([]Load{{Kind: row.kind, Rate: 10, Life: row.life}}, DefaultTimeouts)
		if err != nil || math.Abs(got-row.want) > 1e-6 {
			t.Errorf("%s living %v: %v entries, want %v: %v", row.kind, row.life, got, row.want, err)
		}
		// The ceiling of exactly that table is that rate again.
		if rate, err := ceilingOf(int(row.want), row.kind, row.life, DefaultTimeouts); err != nil || math.Abs(rate-10) > 1e-9 {
			t.Errorf("%s living %v: the table carries %v/s, want 10: %v", row.kind, row.life, rate, err)
		}
	}
}

func TestLimitsOfTheKernel(t *testing.T) {
	for _, row := range []struct {
		name      string
		got, want float64
	}{
		{"expectations of 65,536 buckets", float64(ExpectMax(65536)), 1024},
		{"expectations of 262,144 buckets", float64(ExpectMax(262144)), 4096},
		{"expectations of few buckets", float64(ExpectMax(100)), 4},
		{"bytes of a million entries and buckets", float64(Memory(1e6, 1e6, 0)), 392e6},
		{"bytes of expectations", float64(Memory(0, 0, 10)), 2160},
		{"SNAT to one destination, 120 s", math.Floor(snatCeiling(snatPorts, 120*second)), 537},
	} {
		if row.got != row.want {
			t.Errorf("%s: %v, want %v", row.name, row.got, row.want)
		}
	}
}

func TestWhenATableFills(t *testing.T) {
	for _, row := range []struct {
		entries, limit int
		rate           float64
		want           time.Duration
		fills          bool
	}{
		{0, 1000, 10, 100 * second, true},
		{1000, 1000, 0, 0, true},
		{0, 1000, 0, 0, false},
		{0, 1000, -5, 0, false},
		{0, math.MaxInt32, 1e-12, 0, false},
	} {
		if got, fills := FullIn(row.entries, row.limit, row.rate); got != row.want || fills != row.fills {
			t.Errorf("%d of %d at %v/s: %v %v, want %v %v", row.entries, row.limit, row.rate, got, fills, row.want, row.fills)
		}
	}
}

func TestAPlanGoesBothWays(t *testing.T) {
	p, err := Make(Config{
		Loads:    []Load{{Kind: TCPClosed, Rate: 4000}, {Kind: TFTP, Rate: 100}},
		Timeouts: DefaultTimeouts, Headroom: 0.25, Limit: 512 << 10, Wait: second, Lost: 0.1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if p.Entries != 486000 || p.Table != 648000 || p.Expectations != 3090 || math.Floor(p.Ceilings[0]) != 4369 ||
		p.Bytes != Memory(648000, 648000, 3090) {
		t.Errorf("%+v", p)
	}
}

func TestWhatCannotBePlannedIsRefused(t *testing.T) {
	for name, c := range map[string]Config{
		"no load":        {},
		"unknown kind":   {Loads: []Load{{Kind: "carrier-pigeon"}}},
		"negative rate":  {Loads: []Load{{Kind: UDPAnswered, Rate: -1}}},
		"not a number":   {Loads: []Load{{Kind: UDPAnswered, Rate: math.NaN()}}},
		"negative life":  {Loads: []Load{{Kind: UDPAnswered, Life: -1}}},
		"part NaN":       {Loads: []Load{{Kind: UDPAnswered}}, Headroom: math.NaN()},
		"lost NaN":       {Loads: []Load{{Kind: UDPAnswered}}, Lost: math.NaN()},
		"lost no end":    {Loads: []Load{{Kind: UDPAnswered}}, Lost: math.Inf(1)},
		"next to none":   {Loads: []Load{{Kind: TCPIdle, Rate: 1}}, Timeouts: DefaultTimeouts, Headroom: 1 - 1e-15},
		"kept for 0 s":   {Loads: []Load{{Kind: UDPAnswered}}, Limit: 1},
		"expects all":    {Loads: []Load{{Kind: TFTP, Rate: 1e300}}, Wait: 1},
		"no room at all": {Loads: []Load{{Kind: UDPAnswered}}, Headroom: 1},
		"lost too much":  {Loads: []Load{{Kind: UDPAnswered}}, Lost: 2},
		"negative table": {Loads: []Load{{Kind: UDPAnswered}}, Limit: -1},
		"more than fits": {Loads: []Load{{Kind: TCPIdle, Rate: 1e6}}, Timeouts: DefaultTimeouts},
	} {
		if _, err := Make(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// snatCeiling returns the highest rate of new connections from one source address to one
// destination address and port: every port is in use until its entry expires.
func snatCeiling(ports int, kept time.Duration) float64 { return float64(ports) / kept.Seconds() }
