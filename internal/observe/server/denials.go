package server

import (
	"context"
	"time"

	"spillway.dev/spillway/internal/diagnosis/doctor"
)

// denied reads the counters of policies, and returns those that denied packets since the readings
// in memory began.
func (s *Server) denied(ctx context.Context) (list []doctor.Denial, err error) {
	if s.cfg.Denials == nil {
		return nil, nil
	}
	s.denials.mu.Lock()
	defer s.denials.mu.Unlock()
	packets, err := s.cfg.Denials.Denials(ctx)
	if err != nil {
		return nil, err
	}
	for _, g := range s.denials.add(reading{time.Now(), packets}) {
		list = append(list, doctor.Denial{Policy: g.name, Packets: g.by, Window: g.window})
	}
	return list, nil
}
