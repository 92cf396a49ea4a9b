package takeover

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

// A kube-proxy that ends may be visible by its port when its process has no namespace any
// more. After a restart it has another pid.
func TestARunningKubeProxyIsSaidOnce(t *testing.T) {
	var log bytes.Buffer
	to := New(Config{Wanted: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
	said := func(sign string, err error, want int) {
		t.Helper()
		to.running = func() (string, error) { return sign, err }
		to.check(t.Context())
		if n := strings.Count(log.String(), stillRuns); n != want {
			t.Errorf("after sign %q, error %v it was said %d times, want %d:\n%s", sign, err, n, want, log.String())
		}
	}
	said("process 7", nil, 1)
	said("process 7", nil, 1)
	said("another process has port 10256", nil, 1)
	said("process 8", nil, 1)
	said("", errors.New("no /proc"), 1)
	said("process 8", nil, 2) // the last logged state is out of date
}
