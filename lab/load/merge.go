package load

import (
	"errors"
	"fmt"
	"slices"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// encode returns a histogram in HdrHistogram's compressed V2 encoding.
func encode(h *hdrhistogram.Histogram) string {
	text, err := h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	if err != nil {
		return "" // it writes to memory
	}
	return string(text)
}

// Point is a percentile (0 to 100) and its latency in µs.
type Point struct{ Percentile, Micros float64 }

// Distribution returns the meaningful percentiles, up to that of the slowest request.
func (r *Result) Distribution() []Point {
	h, err := r.histogram()
	if err != nil || h.TotalCount() == 0 {
		return nil
	}
	var out []Point
	for _, p := range []float64{0, 10, 25, 50, 75, 90, 95, 97.5, 99, 99.5, 99.75, 99.9, 99.95, 99.975, 99.99, 99.999} {
		if behind := float64(h.TotalCount()) * (100 - p) / 100; behind < 1 {
			break // no request is above this percentile
		}
		out = append(out, Point{p, float64(h.ValueAtPercentile(p)) / 1000})
	}
	return out
}

func (r *Result) histogram() (*hdrhistogram.Histogram, error) {
	if r.Histogram == "" {
		return newHistogram(), nil
	}
	h, err := hdrhistogram.Decode([]byte(r.Histogram))
	if err != nil {
		return nil, fmt.Errorf("read histogram of a load: %w", err)
	}
	return h, nil
}

// Merge adds up results of generators that ran side by side: rates add, and the
// latency is that of all requests together.
func Merge(results []*Result) (*Result, error) {
	if len(results) == 0 {
		return nil, errors.New("merge results of loads: there are none")
	}
	all := *results[0]
	all.Errors, all.Statuses, all.Slow = nil, nil, nil
	all.Requests, all.Bytes, all.Over1s, all.Over3s, all.UnderWay, all.Connections = 0, 0, 0, 0, 0, 0
	all.Rate, all.WantedRate, all.ClientCPUSeconds = 0, 0, 0
	h := newHistogram()
	for _, r := range results {
		one, err := r.histogram()
		if err != nil {
			return nil, err
		}
		h.Merge(one)
		all.Requests += r.Requests
		all.Bytes += r.Bytes
		all.UnderWay += r.UnderWay
		all.Over1s += r.Over1s
		all.Over3s += r.Over3s
		all.Connections += r.Connections
		all.Rate += r.Rate
		all.WantedRate += r.WantedRate
		all.ClientCPUSeconds += r.ClientCPUSeconds
		all.Seconds = max(all.Seconds, r.Seconds)
		all.ClientLimited = all.ClientLimited || r.ClientLimited
		all.Interrupted = all.Interrupted || r.Interrupted
		all.Slow = slices.Concat(all.Slow, r.Slow)
		for status, n := range r.Statuses {
			if all.Statuses == nil {
				all.Statuses = map[int]int64{}
			}
			all.Statuses[status] += n
		}
		for kind, n := range r.Errors {
			if all.Errors == nil {
				all.Errors = map[string]int64{}
			}
			all.Errors[kind] += n
		}
	}
	all.Latency, all.Histogram = summarize(h), encode(h)
	return &all, nil
}
