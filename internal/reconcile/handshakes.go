package reconcile

import (
	"time"

	"spillway.dev/spillway/internal/dataplane"
)

// handshakeInterval is the time between two looks at the handshakes of watched endpoints.
const handshakeInterval = 200 * time.Millisecond

// handshakes is when to look at the handshakes of watched endpoints.
type handshakes struct {
	watcher dataplane.HandshakeWatcher // nil: no backend counts them
	at      time.Time                  // of the next look
	failing bool                       // the last look failed
}

// newHandshakes uses the first backend that counts handshakes.
func newHandshakes(backends []dataplane.Backend) (h handshakes) {
	for _, b := range backends {
		if w, ok := b.(dataplane.HandshakeWatcher); ok {
			h.watcher = w
			break
		}
	}
	return h
}

// handshakesDue returns when to look, and whether to look at all.
func (r *Reconciler) handshakesDue() (at time.Time, any bool) {
	return r.handshakes.at, r.handshakes.watcher != nil && r.cfg.Tracker.Services().Watching()
}

// watchHandshakes passes the outcomes of handshakes to the tracker.
func (r *Reconciler) watchHandshakes(now time.Time) {
	h := &r.handshakes
	at, any := r.handshakesDue()
	if !any || now.Before(at) {
		return
	}
	h.at = now.Add(handshakeInterval)
	outcomes, err := h.watcher.Outcomes()
	if failing := err != nil; failing != h.failing {
		h.failing = failing
		if failing {
			r.log.Warn("Handshakes with endpoints cannot be read; none is ejected anew", "error", err)
		}
	}
	if err == nil {
		r.enqueue(r.cfg.Tracker.Observe(now, outcomes))
		r.metrics.SetEjected(r.cfg.Tracker.Services().Ejected())
	}
}
