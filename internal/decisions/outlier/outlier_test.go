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
		e := endpointAt{o: test.o}
		if got := e.look(1000); got != test.want {
			t.Errorf("%s: ejected %v, want %v", test.name, got, test.want)
		}
	}
}

// endpointAt is an endpoint whose handshakes a test counts.
type endpointAt struct {
	d      Detector
	o      Outcome
	checks func(dead bool) Answer // nil: it answers a check as it answers clients
	asked  int
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

// look returns whether the endpoint is ejected after its handshakes, and its checks if any.
func (e *endpointAt) look(ms int) bool {
	e.o.ID, e.o.Endpoint = 7, addr
	now := at(ms)
	e.d.Observe(now, []Outcome{e.o}, nil)
	var results []Result
	for _, c := range e.d.Checks(now) {
		answer := Accepted
		if dead := e.o.Failed > 0; e.checks != nil {
			answer = e.checks(dead)
		} else if dead {
			answer = Failed
		}
		results = append(results, Result{c, answer})
	}
	e.asked += len(results)
	e.d.Observe(now, []Outcome{e.o}, results)
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
	if !e.d.Observe(at(1), nil, nil) || len(e.d.Ejections()) != 0 {
		t.Error("an endpoint that has left the Service is still ejected")
	}
	if e.d.Observe(at(2), nil, nil) {
		t.Error("a change without an endpoint")
	}
}

func TestTheFirstEjectedIsInFront(t *testing.T) {
	var d Detector
	one := Outcome{ID: 1, Endpoint: netip.MustParseAddrPort("10.1.0.9:80"), Failed: 5, Refused: 5, Since: at(0)}
	two := Outcome{ID: 2, Endpoint: addr}
	look := func(ms int) {
		all := []Outcome{one, two}
		d.Observe(at(ms), all, nil)
		var results []Result
		for _, c := range d.Checks(at(ms)) {
			results = append(results, Result{c, Failed})
		}
		d.Observe(at(ms), all, results)
	}
	look(10)
	two.Failed, two.Refused, two.Since = 5, 5, at(15)
	look(20)
	list := d.Ejections()[intent.PortID{}]
	if len(list) != 2 || list[0].Endpoint != one.Endpoint || list[1].Endpoint != addr {
		t.Errorf("ejected %v", list)
	}
}

// silent counts handshakes without an answer, as a forger of SYNs makes them.
func (e *endpointAt) silent(ms, n int) bool {
	if e.o.Since.IsZero() {
		e.o.Since = at(ms)
	}
	e.o.Failed += uint32(n)
	return e.look(ms)
}

// Whatever handshakes fail, and however many: an endpoint that accepts the agent's connection
// works. It is not asked more than once a second.
func TestAnEndpointThatAcceptsTheAgentIsNotEjected(t *testing.T) {
	e := endpointAt{checks: func(bool) Answer { return Accepted }}
	const seconds = 60
	for ms := 0; ms < 1000*seconds; ms += 200 {
		fails := e.silent
		if ms >= 1000*seconds/2 {
			fails = e.fail
		}
		if fails(ms, 20) {
			t.Fatalf("ejected after %d ms", ms)
		}
	}
	if e.asked < 10 || e.asked > seconds {
		t.Errorf("%d checks in %d s", e.asked, seconds)
	}
	e.checks = nil
	if ms := 1000 * seconds; e.silent(ms, 4) || !e.silent(ms+2000, 1) {
		t.Error("when it accepts no connection any more, it must be ejected after five")
	}
}

// An endpoint that accepts connections of clients, but none of the agent: a NetworkPolicy denies the
// node. Handshakes that fail between those of clients do not eject it, and it is not asked often.
func TestAnEndpointThatTheAgentCannotReach(t *testing.T) {
	e := endpointAt{checks: func(bool) Answer { return Failed }}
	last := 0
	for ms := 0; ms < 120_000; ms += 200 {
		ejected := false
		if ms%4000 == 0 || ms == 200 { // the first two clients come before the forger
			ejected, last = e.accept(ms), ms
		} else {
			ejected = e.silent(ms, 20)
		}
		if ejected {
			t.Fatalf("ejected after %d ms", ms)
		}
	}
	if e.asked > 200 {
		t.Errorf("%d checks", e.asked)
	}
	dead := 0
	for ms := last + 200; dead == 0 && ms < last+20_000; ms += 200 {
		if e.silent(ms, 1) {
			dead = ms - last
		}
	}
	if dead < 5000 || dead > 6000 {
		t.Errorf("ejected %d ms after its last connection, want 5 s", dead)
	}
}

// A client's connection withdraws what a check has found.
func TestAnEndpointThatAcceptsAClientDuringACheck(t *testing.T) {
	var d Detector
	o := Outcome{ID: 7, Endpoint: addr, Failed: 9, Since: at(0)}
	d.Observe(at(1000), []Outcome{o}, nil)
	checks := d.Checks(at(1000))
	if len(checks) != 1 || checks[0].Endpoint != addr {
		t.Fatalf("checks %v", checks)
	}
	works := Outcome{ID: 7, Endpoint: addr, Accepted: at(1200)}
	d.Observe(at(1300), []Outcome{works}, nil)
	if d.Observe(at(1500), []Outcome{works}, []Result{{checks[0], Failed}}) {
		t.Error("ejected although it has accepted a connection")
	}
}

// An agent that cannot connect, for want of a file descriptor, knows nothing, and asks again.
func TestACheckThatTheAgentCannotMake(t *testing.T) {
	e := endpointAt{checks: func(bool) Answer { return Unknown }}
	for ms := 0; ms < 3000; ms += 200 {
		if e.silent(ms, 20) {
			t.Fatal("ejected")
		}
	}
	if e.checks = nil; e.asked < 2 || !e.silent(4000, 20) {
		t.Errorf("%d checks; want an ejection when it can", e.asked)
	}
}

// An endpoint that dies and works again is not taken for one that the agent cannot reach.
func TestAnEndpointThatDiesAgain(t *testing.T) {
	var e endpointAt
	e.accept(0)
	for ms := 100_000; ms < 400_000; ms += 100_000 {
		if !e.silent(ms, 5) && !e.look(ms+500) {
			t.Fatalf("not ejected %d ms after the start", ms)
		}
		if e.accept(ms + 95_000) {
			t.Fatal("ejected although it works")
		}
	}
}

// An endpoint that dies as soon as it has accepted its first client is not taken for one that the
// agent cannot reach.
func TestAnEndpointThatDiesAtOnce(t *testing.T) {
	e := endpointAt{checks: func(bool) Answer { return Failed }}
	e.accept(0)
	e.silent(200, 5)
	if e.look(700); !e.look(1300) {
		t.Error("not ejected")
	}
}
