package reconcile

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/facts/model"
)

// handshakeBackend also counts handshakes.
type handshakeBackend struct {
	*fakeBackend
	outcomes []outlier.Outcome
	looks    int
	err      error
}

func (b *handshakeBackend) Outcomes() ([]outlier.Outcome, error) {
	b.looks++
	return slices.Clone(b.outcomes), b.err
}

func TestEndpointsThatRefuseAreEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &handshakeBackend{fakeBackend: newFakeBackend("ebpf")}
		var asked netip.AddrPort
		var answer error // of an endpoint that the agent connects to
		g := start(t, func(c *Config) {
			c.Backends = []dataplane.Backend{b}
			c.Connect = func(ctx context.Context, endpoint netip.AddrPort) error {
				asked = endpoint
				return answer
			}
			c.Tracker = decisions.New(intent.Config{NodeName: "n1", OutlierEjection: true}, donottrack.Config{NodeName: "n1"})
		})
		web := &model.Service{
			Name: svcName("web"), ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports:       []model.ServicePort{{Protocol: model.TCP, Port: 80}},
			Annotations: map[string]string{intent.OutlierEjectionAnnotation: "true"},
		}
		slice := &model.EndpointSlice{Name: svcName("web-1"), Service: svcName("web"), Family: model.IPv4,
			Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 8080}}}
		for _, a := range []string{"10.1.0.1", "10.1.0.2"} {
			slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: netip.MustParseAddr(a), Ready: true, Serving: true})
		}
		g.after(5 * time.Second)
		if b.looks > 0 {
			t.Errorf("%d looks without a Service", b.looks)
		}
		g.Deliver(model.Delta{Full: true, Services: map[model.Name]*model.Service{web.Name: web},
			Slices: map[model.Name]*model.EndpointSlice{slice.Name: slice}}, nil)
		g.after(5 * time.Second)
		// written returns which endpoints the last write has ejected.
		written := func() string {
			for _, c := range slices.Backward(b.log()) {
				for _, p := range c.ports {
					return fmt.Sprint(p.Endpoints[0].Ejected, p.Endpoints[1].Ejected)
				}
			}
			return "nothing"
		}
		want := func(when, ejected string) {
			t.Helper()
			if got := written(); got != ejected {
				t.Errorf("%s: ejected %s, want %s", when, got, ejected)
			}
		}
		id := intent.PortID{Service: web.Name, Number: 80, Protocol: model.TCP, Family: model.IPv4}
		b.outcomes = []outlier.Outcome{{ID: 1, Port: id, Endpoint: netip.MustParseAddrPort("10.1.0.2:8080"), Failed: 5,
			Refused: 5, Since: time.Now()}}
		g.after(2 * handshakeInterval)
		want("while it accepts the agent's connection", "nothing")
		if asked != b.outcomes[0].Endpoint {
			t.Errorf("the agent has connected to %s", asked)
		}
		answer = unix.ECONNREFUSED
		b.outcomes[0].Failed, b.outcomes[0].Refused = 10, 10
		g.after(2 * time.Second)
		want("after ten refusals, and one of the agent", "false true")
		b.err = errors.New("the map is gone")
		g.after(15 * time.Second)
		want("while nothing can be read", "false true")
		b.err, b.outcomes[0] = nil, outlier.Outcome{ID: 1, Port: id, Endpoint: b.outcomes[0].Endpoint, Accepted: time.Now()}
		g.after(handshakeInterval)
		want("after the back-off", "false false")
		if n := strings.Count(g.log.String(), "Handshakes with endpoints cannot be read"); n != 1 {
			t.Errorf("%d warnings, want 1", n)
		}
	})
}

// TestChecks connects to endpoints of several namespaces that do not answer, more than there is
// room for. Each namespace gets its part.
func TestChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		timedOut := make(chan struct{})
		c := checks{running: map[outlier.Check]struct{}{}, connect: func(_ context.Context, endpoint netip.AddrPort) error {
			if endpoint.Port() == 80 {
				return nil
			}
			<-timedOut
			return &net.OpError{Op: "dial", Err: context.DeadlineExceeded}
		}}
		many := func(namespace string, port uint16, count int) (all []outlier.Check) {
			for i := range count {
				all = append(all, outlier.Check{ID: uint32(i), Port: intent.PortID{Service: model.Name{Namespace: namespace, Name: "web"}},
					Endpoint: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.1"), port)})
			}
			return all
		}
		greedy, other := many("greedy", 9, 10*checksMax), many("other", 80, 3)
		for range 3 {
			c.start(t.Context(), greedy)
		}
		if n := len(c.running); n != checksMax/2 {
			t.Errorf("%d checks of one namespace, want %d", n, checksMax/2)
		}
		c.start(t.Context(), append(greedy, other...))
		synctest.Wait()
		results := c.results()
		for _, r := range results {
			if r.Port.Service.Namespace != "other" || r.Answer != outlier.Accepted {
				t.Errorf("result %+v", r)
			}
		}
		if len(results) != len(other) {
			t.Errorf("%d results, want %d", len(results), len(other))
		}
		close(timedOut)
		synctest.Wait()
		results = c.results()
		if len(results) != checksMax/2 || results[0].Answer != outlier.Failed || len(c.running) > 0 {
			t.Errorf("%d results, such as %v; %d checks run", len(results), results, len(c.running))
		}
	})
}

// TestAnswers connects to a socket that listens, and to one that does not.
func TestAnswers(t *testing.T) {
	c := checks{connect: connect}
	for _, network := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", network)
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().(*net.TCPAddr).AddrPort()
		if got := answerOf(c.ask(t.Context(), addr)); got != outlier.Accepted {
			t.Errorf("%s listens: %v", addr, got)
		}
		l.Close()
		if got := answerOf(c.ask(t.Context(), addr)); got != outlier.Failed {
			t.Errorf("%s does not listen: %v", addr, got)
		}
	}
	ctx, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	if got := answerOf(connect(ctx, netip.MustParseAddrPort("127.0.0.1:9"))); got != outlier.Failed {
		t.Errorf("after the timeout: %v", got)
	}
	for err, want := range map[error]outlier.Answer{unix.EHOSTUNREACH: outlier.Failed, unix.EMFILE: outlier.Unknown,
		context.Canceled: outlier.Unknown} {
		if got := answerOf(&net.OpError{Op: "dial", Err: err}); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
}
