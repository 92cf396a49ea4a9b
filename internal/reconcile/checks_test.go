package reconcile

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/decisions/outlier"
)

// TestAnAnswerAtTheTimeoutCounts: an agent that did not run at the timeout finds the kernel's answer
// a moment later. Without an answer, the check fails then.
func TestAnAnswerAtTheTimeoutCounts(t *testing.T) {
	for _, row := range []struct {
		name  string
		after time.Duration // of the answer
		want  outlier.Answer
		took  time.Duration
	}{
		{"in time", checkTimeout / 2, outlier.Accepted, checkTimeout / 2},
		{"seen after the timeout", checkTimeout + checkGrace/2, outlier.Accepted, checkTimeout + checkGrace/2},
		{"too late", 2 * checkTimeout, outlier.Failed, checkTimeout + checkGrace},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := checks{connect: func(ctx context.Context, _ netip.AddrPort) error {
					select {
					case <-ctx.Done():
						return ctx.Err()
					case <-time.After(row.after):
						return nil
					}
				}}
				began := time.Now()
				got := answerOf(c.ask(t.Context(), netip.MustParseAddrPort("10.1.0.1:80")))
				if took := time.Since(began); got != row.want || took != row.took {
					t.Errorf("answer %v after %v, want %v after %v", got, took, row.want, row.took)
				}
			})
		})
	}
}
