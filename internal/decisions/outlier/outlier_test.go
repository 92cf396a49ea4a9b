package outlier

import (
	"net/netip"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
)

var (
	addr  = netip.MustParseAddrPort("10.1.0.1:80")
	start = time.Unix(1000, 0)
)

// at returns a time so many milliseconds after the start.
func at(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }

func TestAnEndpointIsEjectedWhen(t *testing.T) {
	for _, test := range []struct {
		name string
		o    Outcome
		want bool
	}{
		{"no handshake failed", Outcome{}, false},
		{"four were refused", Outcome{Failed: 4, Refused: 4, Since: at(0)}, false},
		{"five were refused", Outcome{Failed: 5, Refused: 5, Since: at(999)}, true},
		{"five wait for an answer for a short time", Outcome{Failed: 5, Since: at(600)}, false},
		{"five got no answer", Outcome{Failed: 5, Since: at(500)}, true},
		{"four got no answer", Outcome{Failed: 4, Since: at(0)}, false},
		{"some were refused, and others are new", Outcome{Failed: 6, Refused: 4, Since: at(900)}, false},
	} {
		var d Detector
		test.o.ID, test.o.Endpoint = 1, addr
		changed := d.Observe(at(1000), []Outcome{test.o})
		if got := len(d.Ejections()) == 1; got != test.want || changed != test.want {
			t.Errorf("%s: ejected %v, changed %v, want %v", test.name, got, changed, test.want)
		}
	}
}

// endpointAt is an endpoint whose handshakes a test counts.
type endpointAt struct {
	d Detector
	o Outcome
}

// fail counts handshakes that are refused, and returns whether the endpoint is ejected.
func (e *endpointAt) fail(ms, n int) bool {
	if e.o.Since.IsZero() {
		e.o.Since = at(ms)
	}
	e.o.Failed += uint32(n)
	e.o.Refused += uint32(n)
	return e.look(ms)
}

func (e *endpointAt) accept(ms int) bool {
	e.o.Failed, e.o.Refused, e.o.Since, e.o.Accepted = 0, 0, time.Time{}, at(ms)
	return e.look(ms)
}

func (e *endpointAt) look(ms int) bool {
	e.o.ID, e.o.Endpoint = 7, addr
	e.d.Observe(at(ms), []Outcome{e.o})
	return len(e.d.Ejections()) > 0
}

func TestTheBackOffGrows(t *testing.T) {
	var e endpointAt
	ms, fails := 1000, 5
	for _, seconds := range []int{10, 20, 40, 80, 160, 300, 300} {
		if e.fail(ms, fails-1) {
			t.Fatalf("ejected after %d failures", fails-1)
		}
		if !e.fail(ms, 1) {
			t.Fatalf("not ejected after %d failures", fails)
		}
		if ms += seconds*1000 - 1; !e.look(ms) {
			t.Fatalf("ejected for less than %d s", seconds)
		}
		if ms++; e.look(ms) {
			t.Fatalf("ejected for more than %d s", seconds)
		}
		fails = 2
	}
}

func TestAnEndpointThatWorksAgain(t *testing.T) {
	var e endpointAt
	e.fail(0, 5)
	if e.accept(10_001); e.fail(10_002, 4) || !e.fail(10_003, 1) {
		t.Error("want another ejection after five failures")
	}
	if got := e.d.Ejections()[intent.PortID{}][0].Until; !got.Equal(at(30_003)) {
		t.Errorf("ejected until %v, want 20 s", got)
	}
	e.accept(30_004)
	e.accept(30_004 + 301_000)
	e.fail(400_000, 5)
	if got := e.d.Ejections()[intent.PortID{}][0].Until; !got.Equal(at(410_000)) {
		t.Errorf("ejected until %v, want 10 s after five minutes of work", got)
	}
}

func TestAnEndpointThatLeaves(t *testing.T) {
	var e endpointAt
	if !e.fail(0, 5) {
		t.Fatal("not ejected")
	}
	if !e.d.Observe(at(1), nil) || len(e.d.Ejections()) != 0 {
		t.Error("an endpoint that has left the Service is still ejected")
	}
	if e.d.Observe(at(2), nil) {
		t.Error("a change without an endpoint")
	}
}

func TestTheFirstEjectedIsInFront(t *testing.T) {
	var d Detector
	one := Outcome{ID: 1, Endpoint: netip.MustParseAddrPort("10.1.0.9:80"), Failed: 5, Refused: 5, Since: at(0)}
	two := Outcome{ID: 2, Endpoint: addr}
	d.Observe(at(10), []Outcome{one, two})
	two.Failed, two.Refused, two.Since = 5, 5, at(15)
	d.Observe(at(20), []Outcome{one, two})
	list := d.Ejections()[intent.PortID{}]
	if len(list) != 2 || list[0].Endpoint != one.Endpoint || list[1].Endpoint != addr {
		t.Errorf("ejected %v", list)
	}
}
