package load

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// clientBusy is the share of its threads' time above which the generator counts as the
// limit of the rate.
const clientBusy = 0.95

// Result is the result of one run. `spillway-lab load` prints its JSON form.
type Result struct {
	Kind        Kind    `json:"kind"`
	Target      string  `json:"target"`
	Connections int     `json:"connections"`
	WantedRate  float64 `json:"wanted_rate,omitempty"` // 0: closed loop
	Requests    int64   `json:"requests"`              // answered, after the warm-up
	// Errors counts failed requests by cause: "refused", "reset", "closed", "timeout",
	// "unreachable", "not sent" (the open loop ended while every connection was busy),
	// "status 502", "bad response", ...
	Errors map[string]int64 `json:"errors,omitempty"`
	// Statuses counts answers by HTTP status with AnyStatus.
	Statuses map[int]int64 `json:"statuses,omitempty"`
	Seconds  float64       `json:"seconds"` // measured, without warm-up
	Rate     float64       `json:"rate"`    // Requests per second
	Latency  Latency       `json:"latency_us"`
	// Over1s and Over3s count requests, including failed ones, that took longer: the
	// kernel retransmits a lost SYN after 1 s and after 3 s.
	Over1s int64 `json:"over_1s"`
	Over3s int64 `json:"over_3s"`
	// UnderWay counts requests that a closed loop left unanswered at its end. Requests
	// and Errors exclude them. Over1s includes the slow ones.
	UnderWay int64 `json:"under_way,omitempty"`
	// Slow lists the latencies over 1 s, up to 1000 a thread.
	Slow []SlowRequest `json:"slow,omitempty"`
	// Histogram is every latency, in nanoseconds, in HdrHistogram's compressed
	// V2 encoding.
	Histogram string `json:"histogram,omitempty"`
	Bytes     int64  `json:"bytes"` // received, headers included
	// ClientCPUSeconds is the generator's user and system time, including the warm-up.
	// System time includes the kernel's work for its packets in its context, which
	// between namespaces is much of their path.
	ClientCPUSeconds float64 `json:"client_cpu_seconds"`
	// ClientLimited reports that the generator was busy all the time: the server may be
	// able to handle more.
	ClientLimited bool `json:"client_limited"`
	// Interrupted reports that the run ended early.
	Interrupted bool `json:"interrupted,omitempty"`
}

// Latency is a summary in microseconds. In an open loop it counts from the intended send
// time, and includes failed requests with the time until they failed. In a closed loop it
// includes answered requests only.
type Latency struct {
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99.9"`
	Max  float64 `json:"max"`
	Mean float64 `json:"mean"`
}

// maxSlow bounds the list of slow requests.
const maxSlow = 1000

// SlowRequest is one that took more than a second.
type SlowRequest struct {
	At      float64 `json:"at"`      // seconds since the measurement began, of the intended send
	Seconds float64 `json:"seconds"` // until the answer
	Source  string  `json:"source,omitempty"`
	Error   string  `json:"error,omitempty"`
}

// Failed is the number of failed requests.
func (r *Result) Failed() int64 {
	var n int64
	for _, c := range r.Errors {
		n += c
	}
	return n
}

// newHistogram covers 100 ns to 10 minutes with three digits, in nanoseconds.
func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(100, int64(10*time.Minute), 3)
}

// summarize reads the percentiles of a histogram of nanoseconds.
func summarize(h *hdrhistogram.Histogram) Latency {
	if h.TotalCount() == 0 {
		return Latency{}
	}
	us := func(ns int64) float64 { return float64(ns/100) / 10 }
	return Latency{
		P50:  us(h.ValueAtPercentile(50)),
		P99:  us(h.ValueAtPercentile(99)),
		P999: us(h.ValueAtPercentile(99.9)),
		Max:  us(h.Max()),
		Mean: us(int64(h.Mean())),
	}
}

// merge adds up what the loops counted.
func merge(cfg Config, loops []*loop, cpu float64, wall time.Duration, interrupted bool) *Result {
	r := &Result{
		Kind: cfg.Kind, Target: cfg.Target.String(), Connections: cfg.Connections,
		WantedRate: cfg.Rate, ClientCPUSeconds: cpu, Interrupted: interrupted,
	}
	h := newHistogram()
	for _, l := range loops {
		h.Merge(l.hist)
		r.UnderWay += l.underWay
		r.Over1s += l.slow[0]
		r.Over3s += l.slow[1]
		r.Slow = append(r.Slow, l.slowList...)
		r.Requests += l.answered
		r.Bytes += l.bytes
		r.Seconds = max(r.Seconds, float64(l.measured)/1e9)
		for status, n := range l.statuses {
			if r.Statuses == nil {
				r.Statuses = map[int]int64{}
			}
			r.Statuses[status] += n
		}
		for kind, n := range l.errors {
			if r.Errors == nil {
				r.Errors = map[string]int64{}
			}
			r.Errors[kind] += n
		}
	}
	if r.Seconds > 0 {
		r.Rate = float64(r.Requests) / r.Seconds
	}
	r.Latency = summarize(h)
	r.Histogram = encode(h)
	r.ClientLimited = cpu >= clientBusy*wall.Seconds()*float64(cfg.Threads)
	return r
}
