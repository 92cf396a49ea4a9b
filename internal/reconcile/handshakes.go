package reconcile

import (
	"context"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/outlier"
)

// handshakeInterval is the time between two looks at the handshakes of watched endpoints.
const handshakeInterval = 200 * time.Millisecond

// handshakeShare bounds the time for these looks: one that took 20 ms is followed by the next
// after a second.
const handshakeShare = 50

// handshakes is when to look at the handshakes of watched endpoints.
type handshakes struct {
	watchers []dataplane.HandshakeWatcher // the backends that count them
	at       time.Time                    // of the next look
	failing  bool                         // the last look failed
	checks   *checks
}

func newHandshakes(cfg *Config) (h handshakes) {
	h.checks = &checks{connect: cfg.Connect, running: map[outlier.Check]struct{}{}}
	for _, b := range cfg.Backends {
		if w, ok := b.(dataplane.HandshakeWatcher); ok {
			h.watchers = append(h.watchers, w)
		}
	}
	return h
}

// outcomes returns what all watchers have seen.
func (h *handshakes) outcomes() (all []outlier.Outcome, err error) {
	for _, w := range h.watchers {
		outcomes, err := w.Outcomes()
		if err != nil {
			return nil, err
		}
		all = append(all, outcomes...)
	}
	return all, nil
}

// handshakesDue returns when to look, and whether to look at all.
func (r *Reconciler) handshakesDue() (at time.Time, any bool) {
	return r.handshakes.at, len(r.handshakes.watchers) > 0 && r.cfg.Tracker.Services().Watching()
}

// watchHandshakes passes the outcomes of handshakes and the results of checks to the tracker, and
// starts the checks that it wants.
func (r *Reconciler) watchHandshakes(ctx context.Context, now time.Time) {
	h := &r.handshakes
	at, any := r.handshakesDue()
	if !any || now.Before(at) {
		return
	}
	began := time.Now()
	outcomes, err := h.outcomes()
	h.at = now.Add(max(handshakeInterval, handshakeShare*time.Since(began)))
	if failing := err != nil; failing != h.failing {
		h.failing = failing
		if failing {
			r.log.Warn("Handshakes with endpoints cannot be read; none is ejected anew", "error", err)
		}
	}
	if err == nil {
		r.enqueue(r.cfg.Tracker.Observe(now, outcomes, h.checks.results()))
		h.checks.start(ctx, r.cfg.Tracker.Checks(now))
		r.metrics.SetEjected(r.cfg.Tracker.Services().Ejected())
	}
}
