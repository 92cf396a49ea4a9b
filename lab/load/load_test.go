package load

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// short is a run with a number of requests; the duration only limits a broken one.
func short(kind Kind, target netip.AddrPort) Config {
	return Config{Kind: kind, Target: target, Connections: 4, Duration: 10 * time.Second, MaxRequests: 50}
}

func serve(t *testing.T, h http.HandlerFunc) (netip.AddrPort, *atomic.Int64) {
	t.Helper()
	var opened atomic.Int64
	s := httptest.NewUnstartedServer(h)
	s.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			opened.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String()), &opened
}

func run(t *testing.T, cfg Config) *Result {
	t.Helper()
	r, err := Run(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r.Requests > 0 && (r.Latency.P50 <= 0 || r.Latency.Max < r.Latency.P50 || r.Rate <= 0) {
		t.Errorf("latency and rate do not fit %d requests: %+v", r.Requests, r)
	}
	return r
}

func hello(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Repeat("hello ", 100)) }

func TestKeptConnectionsAreUsedAgain(t *testing.T) {
	target, opened := serve(t, hello)
	r := run(t, short(HTTP, target))
	if r.Requests != 50 || r.Failed() != 0 {
		t.Errorf("got %d requests, errors %v; want 50 and none", r.Requests, r.Errors)
	}
	if n := opened.Load(); n != 4 {
		t.Errorf("server saw %d connections, want 4", n)
	}
	if r.Bytes < 50*600 {
		t.Errorf("received %d bytes, want at least %d", r.Bytes, 50*600)
	}
}

func TestConnOpensOneConnectionARequest(t *testing.T) {
	target, opened := serve(t, hello)
	r := run(t, short(Conn, target))
	if r.Requests != 50 || r.Failed() != 0 {
		t.Errorf("got %d requests, errors %v; want 50 and none", r.Requests, r.Errors)
	}
	if n := opened.Load(); n < 50 {
		t.Errorf("server saw %d connections, want at least 50", n)
	}
}

func TestConnEndsWithReset(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ended := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			ended <- err
			return
		}
		defer c.Close()
		buf := make([]byte, 4096)
		c.Read(buf)
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		_, err = c.Read(buf)
		ended <- err
	}()
	cfg := short(Conn, netip.MustParseAddrPort(l.Addr().String()))
	cfg.Connections, cfg.MaxRequests = 1, 1
	run(t, cfg)
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "connection reset") {
		t.Errorf("the server's read ended with %v, want a reset", err)
	}
}

func TestServerThatClosesAfterEachResponse(t *testing.T) {
	target, opened := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close")
		hello(w, r)
	})
	r := run(t, short(HTTP, target))
	if r.Requests != 50 || r.Failed() != 0 {
		t.Errorf("got %d requests, errors %v; want 50 and none", r.Requests, r.Errors)
	}
	if n := opened.Load(); n < 50 {
		t.Errorf("server saw %d connections, want at least 50", n)
	}
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 on loopback: %v", err)
	}
	go http.Serve(l, http.HandlerFunc(hello))
	defer l.Close()
	cfg := short(Conn, netip.MustParseAddrPort(l.Addr().String()))
	cfg.Sources = []netip.Addr{netip.IPv6Loopback()}
	if r := run(t, cfg); r.Requests != 50 || r.Failed() != 0 {
		t.Errorf("got %d requests, errors %v; want 50 and none", r.Requests, r.Errors)
	}
}

func TestSourceAddress(t *testing.T) {
	var seen atomic.Value
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		seen.Store(r.RemoteAddr)
		hello(w, r)
	})
	cfg := short(Conn, target)
	cfg.Sources = []netip.Addr{netip.MustParseAddr("127.0.0.7")}
	run(t, cfg)
	if s, _ := seen.Load().(string); !strings.HasPrefix(s, "127.0.0.7:") {
		t.Errorf("server saw %q, want 127.0.0.7", s)
	}
}

func TestErrorsAreCountedByKind(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := netip.MustParseAddrPort(l.Addr().String())
	l.Close()
	broken, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) })
	cutter, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		c, _, _ := http.NewResponseController(w).Hijack()
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
		c.Close()
	})
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	tests := []struct {
		name   string
		kind   Kind
		target netip.AddrPort
		want   string
	}{
		{"no listener", Conn, closed, "refused"},
		{"no listener, kept connections", HTTP, closed, "refused"},
		{"no listener, UDP", UDP, closed, "refused"},
		{"an error status", HTTP, broken, "status 502"},
		{"half a response", HTTP, cutter, "closed"},
		{"no answer", UDP, netip.MustParseAddrPort(silent.LocalAddr().String()), "timeout"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := short(tt.kind, tt.target)
			cfg.MaxRequests = 8
			if tt.want == "timeout" {
				cfg.Timeout = 30 * time.Millisecond // on a busy machine, any other error takes longer
			}
			r := run(t, cfg)
			if diff := cmp.Diff(map[string]int64{tt.want: 8}, r.Errors); diff != "" || r.Requests != 0 {
				t.Errorf("%d requests answered, errors (-want +got):\n%s", r.Requests, diff)
			}
		})
	}
}

func TestUDP(t *testing.T) {
	for _, fresh := range []bool{false, true} {
		t.Run(fmt.Sprintf("fresh=%v", fresh), func(t *testing.T) {
			pc, err := net.ListenPacket("udp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer pc.Close()
			sources := make(chan string, 1000)
			go func() {
				buf := make([]byte, 100)
				for {
					n, from, err := pc.ReadFrom(buf)
					if err != nil {
						return
					}
					sources <- from.String()
					pc.WriteTo(buf[:n], from)
				}
			}()
			cfg := short(UDP, netip.MustParseAddrPort(pc.LocalAddr().String()))
			cfg.FreshPorts, cfg.Timeout = fresh, 10*time.Second // enough on a busy machine
			r := run(t, cfg)
			if r.Requests != 50 || r.Failed() != 0 {
				t.Errorf("got %d requests, errors %v; want 50 and none", r.Requests, r.Errors)
			}
			seen := map[string]bool{}
			for len(sources) > 0 {
				seen[<-sources] = true
			}
			if want := 40; fresh != (len(seen) >= want) {
				t.Errorf("fresh ports %v, but the server saw %d sources", fresh, len(seen))
			}
		})
	}
}

// A server that stalls must show in the latency of all requests that were due meanwhile,
// though it delayed only one of them itself.
func TestOpenLoopCountsAStallInFull(t *testing.T) {
	const stall = 300 * time.Millisecond
	var calls atomic.Int64
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) == 10 {
			time.Sleep(stall)
		}
		hello(w, r)
	})
	cfg := Config{Kind: HTTP, Target: target, Connections: 1, Rate: 200, Duration: 700 * time.Millisecond}
	r := run(t, cfg)
	// 60 of 140 requests fell due during the stall. The median of them waited half of it,
	// and a quarter of all waited for more than 60 ms.
	if r.Latency.P99 < float64(stall.Microseconds())*0.8 {
		t.Errorf("p99 is %v µs after a stall of %v", r.Latency.P99, stall)
	}
	if r.Latency.Mean < 20e3 {
		t.Errorf("mean is %v µs: the stall was counted once, not for every request", r.Latency.Mean)
	}
}

func TestOpenLoopReportsWhatItCouldNotSend(t *testing.T) {
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done() // never answers
	})
	cfg := Config{Kind: HTTP, Target: target, Connections: 2, Rate: 1000,
		Duration: 100 * time.Millisecond, Timeout: 500 * time.Millisecond}
	r := run(t, cfg)
	want := map[string]int64{"timeout": 2, "not sent": 98}
	if diff := cmp.Diff(want, r.Errors); diff != "" || r.Requests != 0 {
		t.Errorf("%d answered, errors (-want +got):\n%s", r.Requests, diff)
	}
}

func TestInterruptGivesPartialResult(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var calls atomic.Int64
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) == 20 {
			cancel()
		}
		hello(w, r)
	})
	cfg := Config{Kind: HTTP, Target: target, Connections: 2, Duration: time.Minute}
	r, err := Run(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !r.Interrupted || r.Requests < 10 || r.Seconds <= 0 || r.Seconds > 30 {
		t.Errorf("got %+v, want a partial, interrupted result", r)
	}
}

func TestWarmupDoesNotCount(t *testing.T) {
	var calls atomic.Int64
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) { calls.Add(1); hello(w, r) })
	cfg := Config{Kind: HTTP, Target: target, Connections: 2, Rate: 500,
		Warmup: 200 * time.Millisecond, Duration: 200 * time.Millisecond}
	r := run(t, cfg)
	if got := r.Requests + r.Failed(); got != 100 {
		t.Errorf("%d requests counted, want the 100 that were due after the warm-up", got)
	}
	if n := calls.Load(); n <= r.Requests {
		t.Errorf("the server was asked %d times, want more than the %d that count", n, r.Requests)
	}
}

func TestThreadsShareTheLoad(t *testing.T) {
	target, opened := serve(t, hello)
	cfg := short(HTTP, target)
	cfg.Threads, cfg.Connections = 3, 7
	cfg.MaxRequests = 500
	r := run(t, cfg)
	if r.Requests != 500 || r.Failed() != 0 || opened.Load() > 7 {
		t.Errorf("got %d requests over %d connections, errors %v", r.Requests, opened.Load(), r.Errors)
	}
}

func TestValidate(t *testing.T) {
	good := short(HTTP, netip.MustParseAddrPort("127.0.0.1:80"))
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		change func(*Config)
		want   string
	}{
		"kind":        {func(c *Config) { c.Kind = "ftp" }, `"ftp"`},
		"target":      {func(c *Config) { c.Target = netip.AddrPort{} }, "no target"},
		"port 0":      {func(c *Config) { c.Target = netip.MustParseAddrPort("127.0.0.1:0") }, "no target"},
		"families":    {func(c *Config) { c.Sources = []netip.Addr{netip.IPv6Loopback()} }, "families"},
		"connections": {func(c *Config) { c.Connections = 0 }, "connections is 0"},
		"rate":        {func(c *Config) { c.Rate = -1 }, "rate is -1"},
		"no rate":     {func(c *Config) { c.Rate = math.NaN() }, "rate is NaN"},
		"any rate":    {func(c *Config) { c.Rate = math.Inf(1) }, "rate is +Inf"},
		"high rate":   {func(c *Config) { c.Rate = 1e9 }, "rate is 1e+09"},
		"low rate":    {func(c *Config) { c.Rate = 1e-300 }, "rate is 1e-300"},
		"path":        {func(c *Config) { c.Path = "x" }, "begin it with /"},
		"lines":       {func(c *Config) { c.Path = "/a\r\nX: y" }, "control characters"},
		"tftp, delay": {func(c *Config) { c.Kind, c.MaxRequests, c.Delay = TFTP, 0, 1 }, "leave out"},
		"duration":    {func(c *Config) { c.Duration = 0 }, "duration"},
		"threads":     {func(c *Config) { c.Threads = 5 }, "threads is 5"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := good
			tt.change(&cfg)
			if _, err := Run(context.Background(), cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestResultJSON(t *testing.T) {
	r := Result{Kind: Conn, Target: "10.0.0.1:80", Connections: 8, Requests: 2, Errors: map[string]int64{"reset": 1},
		Seconds: 2, Rate: 1, Latency: Latency{P50: 1, P99: 2, P999: 3, Max: 4, Mean: 1.5}, Bytes: 9, ClientCPUSeconds: 0.5}
	got, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"kind":"conn","target":"10.0.0.1:80","connections":8,"requests":2,"errors":{"reset":1},` +
		`"seconds":2,"rate":1,"latency_us":{"p50":1,"p99":2,"p99.9":3,"max":4,"mean":1.5},"over_1s":0,"over_3s":0,"bytes":9,` +
		`"client_cpu_seconds":0.5,"client_limited":false}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("the JSON form changed (-want +got):\n%s", diff)
	}
}

func TestDNSWaitsForBothAnswers(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var asked [4]atomic.Int64 // by id
	go func() {
		buf := make([]byte, 512)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			id := buf[1]
			// Every tenth AAAA question is forgotten: that request has not been answered.
			if asked[id].Add(1)%10 == 0 && id == idAAAA {
				continue
			}
			buf[2] |= 0x80
			conn.WriteTo(buf[:n], from)
		}
	}()
	cfg := short(DNS, netip.MustParseAddrPort(conn.LocalAddr().String()))
	cfg.Connections, cfg.Timeout = 1, 500*time.Millisecond // enough on a busy machine
	r := run(t, cfg)
	if r.Requests != 45 || r.Errors["timeout"] != 5 {
		t.Errorf("%d answered, errors %v; want 45 and 5 timeouts", r.Requests, r.Errors)
	}
	if a, aaaa := asked[idA].Load(), asked[idAAAA].Load(); a < 50 || aaaa < 50 {
		t.Errorf("%d A and %d AAAA questions, want 50 of each", a, aaaa)
	}
}

func TestSlowRequestsAreListed(t *testing.T) {
	var n atomic.Int64
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 3 {
			time.Sleep(1100 * time.Millisecond)
		}
		hello(w, r)
	})
	cfg := short(Conn, target)
	cfg.Connections, cfg.MaxRequests = 1, 5
	r := run(t, cfg)
	if r.Over1s != 1 || r.Over3s != 0 || len(r.Slow) != 1 {
		t.Fatalf("over 1 s: %d, over 3 s: %d, listed: %v; want 1, 0, one", r.Over1s, r.Over3s, r.Slow)
	}
	if s := r.Slow[0]; s.Seconds < 1.1 || !strings.HasPrefix(s.Source, "127.0.0.1:") || s.Error != "" {
		t.Errorf("listed as %+v", s)
	}
}

func TestDelayAndSourcesTakeTurns(t *testing.T) {
	var sources [3]atomic.Int64
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		var last int
		fmt.Sscanf(r.RemoteAddr, "127.0.0.%d:", &last)
		sources[last].Add(1)
		hello(w, r)
	})
	cfg := short(Conn, target)
	cfg.Connections, cfg.MaxRequests, cfg.Delay = 2, 8, 10*time.Millisecond
	cfg.Sources = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")}
	before := time.Now()
	r := run(t, cfg)
	if a, b := sources[1].Load(), sources[2].Load(); r.Requests != 8 || a < 3 || b < 3 {
		t.Errorf("%d requests, from 127.0.0.1 %d and from 127.0.0.2 %d; want 4 of each", r.Requests, a, b)
	}
	if took := time.Since(before); took < 30*time.Millisecond {
		t.Errorf("4 requests with delays of 10 ms between them were done after %v", took)
	}
	cfg.Rate = 1
	if err := cfg.Validate(); err == nil {
		t.Error("delay and rate: no error")
	}
}

func TestMergeAddsUp(t *testing.T) {
	target, _ := serve(t, hello)
	a, b := run(t, short(HTTP, target)), run(t, short(HTTP, target))
	m, err := Merge([]*Result{a, b})
	if err != nil {
		t.Fatal(err)
	}
	if m.Requests != 100 || m.Rate != a.Rate+b.Rate || m.Latency.Max != max(a.Latency.Max, b.Latency.Max) {
		t.Errorf("merged %d requests, rate %v, max %v", m.Requests, m.Rate, m.Latency.Max)
	}
	d := m.Distribution()
	if len(d) < 8 || d[len(d)-1].Percentile != 99 {
		t.Errorf("of 100 requests the last percentile is %+v, want 99", d)
	}
	if _, err := Merge(nil); err == nil {
		t.Error("of nothing: no error")
	}
}

func TestWhatIsUnderWayAtTheEndIsCounted(t *testing.T) {
	gone := make(chan struct{})
	defer close(gone)
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-gone:
		case <-r.Context().Done():
		}
	})
	cfg := short(Conn, target)
	cfg.Connections, cfg.MaxRequests, cfg.Duration, cfg.Timeout = 3, 0, 1100*time.Millisecond, 5*time.Second
	r := run(t, cfg)
	if r.Requests != 0 || r.Failed() != 0 || r.UnderWay != 3 || r.Over1s != 3 {
		t.Errorf("%d answered, %d failed, %d under way, %d over 1 s; want 0, 0, 3, 3", r.Requests, r.Failed(), r.UnderWay, r.Over1s)
	}
}

// A warm-up at an unreachable rate must not use up the measured time.
func TestARateBeyondTheServerStillCountsAnswers(t *testing.T) {
	target, _ := serve(t, hello)
	cfg := short(HTTP, target)
	cfg.MaxRequests, cfg.Rate, cfg.Warmup, cfg.Duration = 0, maxRate, 300*time.Millisecond, 200*time.Millisecond
	r := run(t, cfg)
	if r.Requests == 0 || r.Errors["not sent"] == 0 {
		t.Errorf("%d answered, errors %v: want answers, and that others were not sent", r.Requests, r.Errors)
	}
}

// tftpServer sends a file of one short block, from another port, after a while.
func tftpServer(t *testing.T, after time.Duration) netip.AddrPort {
	t.Helper()
	return tftpServerFrom(t, "127.0.0.1", after)
}

// tftpServerFrom is tftpServer, but sends the file from an address.
func tftpServerFrom(t *testing.T, source string, after time.Duration) netip.AddrPort {
	t.Helper()
	listen := func(addr string) net.PacketConn {
		conn, err := net.ListenPacket("udp", net.JoinHostPort(addr, "0"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	ask, data := listen("127.0.0.1"), listen(source)
	go func() {
		buf := make([]byte, 512)
		for {
			_, from, err := ask.ReadFrom(buf)
			if err != nil {
				return
			}
			time.AfterFunc(after, func() { _, _ = data.WriteTo([]byte("\x00\x03\x00\x01file"), from) })
		}
	}()
	return netip.MustParseAddrPort(ask.LocalAddr().String())
}

func TestTFTPHasAHistogramAndCountsSlowTransfers(t *testing.T) {
	cfg := Config{Kind: TFTP, Target: tftpServer(t, 1100*time.Millisecond), Connections: 3, Duration: 1500 * time.Millisecond,
		Timeout: 3 * time.Second}
	var told atomic.Int64
	cfg.Progress = func(Progress) { told.Add(1) }
	r := run(t, cfg)
	if r.Requests != 3 || r.Over1s != 3 || r.Over3s != 0 || len(r.Slow) != 3 || r.UnderWay != 3 {
		t.Fatalf("%d answered, %d over 1 s, %d over 3 s, %d listed, %d under way; want 3, 3, 0, 3, 3", r.Requests, r.Over1s, r.Over3s,
			len(r.Slow), r.UnderWay)
	}
	if s := r.Slow[0]; s.Seconds < 1.1 || s.Source == "" || s.Error != "" {
		t.Errorf("listed as %+v", s)
	}
	if d := r.Distribution(); len(d) == 0 || d[0].Micros < 1.09e6 {
		t.Errorf("distribution %v", d)
	}
	if told.Load() == 0 {
		t.Error("Progress was not called")
	}
	cfg.Target, cfg.Timeout = tftpServer(t, time.Hour), 1200*time.Millisecond
	r = run(t, cfg)
	if r.Requests != 0 || r.Errors["timeout"] != 3 || r.Over1s != 3 || r.UnderWay != 3 || r.Slow[0].Error != "timeout" {
		t.Errorf("of a server that is silent: %+v", r)
	}
}

// TestTFTPTakesAnswersOfTheServerOnly: without reverse translation an answer comes from a
// pod's address. The client must reject it.
func TestTFTPTakesAnswersOfTheServerOnly(t *testing.T) {
	cfg := Config{Kind: TFTP, Target: tftpServerFrom(t, "127.0.0.2", 10*time.Millisecond), Connections: 2,
		Duration: 300 * time.Millisecond, Timeout: time.Second}
	r := run(t, cfg)
	if r.Requests != 0 || r.Errors[errOtherAddress.Error()] == 0 {
		t.Errorf("answered from another address than was asked: %d files, errors %v", r.Requests, r.Errors)
	}
}

func TestPostCountsEveryStatus(t *testing.T) {
	var n atomic.Int64
	target, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Method != http.MethodPost || string(body) != `{"a":1}` {
			t.Errorf("%s %q", r.Method, body)
		}
		w.WriteHeader([]int{http.StatusNotFound, http.StatusNoContent}[n.Add(1)%2])
	})
	cfg := short(HTTP, target)
	cfg.Body, cfg.AnyStatus, cfg.Connections = `{"a":1}`, true, 1
	r := run(t, cfg)
	if r.Requests != 50 || r.Failed() != 0 || r.Statuses[404] != 25 || r.Statuses[204] != 25 {
		t.Errorf("%d answered, errors %v, statuses %v", r.Requests, r.Errors, r.Statuses)
	}
}

func TestASourceThatIsNotHereIsNamed(t *testing.T) {
	target, _ := serve(t, hello)
	cfg := short(Conn, target)
	cfg.Sources, cfg.MaxRequests = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, 4
	r := run(t, cfg)
	if n := r.Errors["no such source address, or out of source ports"]; n != 4 {
		t.Errorf("errors %v, want 4 about the source", r.Errors)
	}
}
