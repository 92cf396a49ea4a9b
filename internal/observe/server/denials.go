package server

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/diagnosis/doctor"
)

// denialPause is the time between two readings of the counters of policies.
const denialPause = 10 * time.Second

// denialReading holds what the policies had denied at a time.
type denialReading struct {
	at      time.Time
	packets map[string]uint64 // by policy
}

// denials are the readings of the last refusalWindow, and one before, the oldest first.
type denials struct {
	mu       sync.Mutex
	readings []denialReading
}

// followDenials reads the counters of policies until ctx ends, so that an examination knows
// what they were a minute before.
func (s *Server) followDenials(ctx context.Context) {
	tick := time.NewTicker(denialPause)
	defer tick.Stop()
	for {
		if _, err := s.denied(ctx); err != nil && ctx.Err() == nil {
			s.log.Debug("counting denied packets failed", slog.Any("err", err))
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// denied reads the counters, and returns the policies that denied packets since the readings
// in memory began.
func (s *Server) denied(ctx context.Context) ([]doctor.Denial, error) {
	if s.cfg.Denials == nil {
		return nil, nil
	}
	s.denials.mu.Lock()
	defer s.denials.mu.Unlock()
	packets, err := s.cfg.Denials.Denials(ctx)
	if err != nil {
		return nil, err
	}
	return s.denials.add(denialReading{time.Now(), packets}), nil
}

// add adds a reading, and returns what was denied since the readings in memory began. A policy
// that is missing in the first ones counts from the first that has it: what the kernel counted
// before the agent knew the policy may be old.
func (d *denials) add(now denialReading) (list []doctor.Denial) {
	for len(d.readings) > 1 && now.at.Sub(d.readings[1].at) > refusalWindow {
		d.readings = d.readings[1:]
	}
	d.readings = append(d.readings, now)
	for policy, packets := range now.packets {
		i := slices.IndexFunc(d.readings, func(r denialReading) bool { _, known := r.packets[policy]; return known })
		if first := d.readings[i]; packets > first.packets[policy] {
			list = append(list, doctor.Denial{Policy: policy, Packets: packets - first.packets[policy], Window: now.at.Sub(first.at)})
		}
	}
	slices.SortFunc(list, func(a, b doctor.Denial) int { return cmp.Compare(a.Policy, b.Policy) })
	return list
}
