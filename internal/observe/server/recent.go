package server

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// readingPause is the time between two readings of counters.
const readingPause = 10 * time.Second

// reading holds counters at a time.
type reading struct {
	at     time.Time
	counts map[string]uint64
}

// recent are the readings of the last refusalWindow, and one before, the oldest first.
type recent struct {
	mu       sync.Mutex
	readings []reading
}

// growth is how much a counter has grown.
type growth struct {
	name   string
	by     uint64
	window time.Duration
}

// followCounters reads counters until ctx ends, so that an examination knows what they were a
// minute before.
func (s *Server) followCounters(ctx context.Context) {
	tick := time.NewTicker(readingPause)
	defer tick.Stop()
	for {
		if _, err := s.denied(ctx); err != nil && ctx.Err() == nil {
			s.log.Debug("counting denied packets failed", slog.Any("err", err))
		}
		s.dsrGrowth()
		if _, _, err := s.egressGrowth(); err != nil {
			s.log.Debug("counting egress failed", slog.Any("err", err))
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// add adds a reading, and returns the counters that grew since the readings in memory began. A
// counter that is missing in the first ones counts from the first that has it: what the kernel
// counted before may be old.
func (r *recent) add(now reading) (list []growth) {
	for len(r.readings) > 1 && now.at.Sub(r.readings[1].at) > refusalWindow {
		r.readings = r.readings[1:]
	}
	r.readings = append(r.readings, now)
	for name, n := range now.counts {
		i := slices.IndexFunc(r.readings, func(r reading) bool { _, known := r.counts[name]; return known })
		if first := r.readings[i]; n > first.counts[name] {
			list = append(list, growth{name, n - first.counts[name], now.at.Sub(first.at)})
		}
	}
	slices.SortFunc(list, func(a, b growth) int { return cmp.Compare(a.name, b.name) })
	return list
}
