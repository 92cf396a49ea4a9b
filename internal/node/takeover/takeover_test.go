package takeover

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/internal/node/kubeproxy"
)

// The log says why the NAT hooks are released: an agent whose rules translate does not wait
// until connections have ended.
func TestTheLogSaysWhyNATIsReleased(t *testing.T) {
	netnstest.Enter(t)
	for netfilter, want := range map[bool]string{true: "hooks of their own", false: "has ended"} {
		var log bytes.Buffer
		to := New(Config{Netfilter: netfilter, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err := kubeproxy.KeepNAT(); err != nil {
			t.Fatal(err)
		}
		if to.releaseUnusedNAT(t.Context()) {
			t.Error("the hooks are kept without a connection")
		}
		if kept, err := kubeproxy.NATKept(); kept || err != nil {
			t.Errorf("hooks are left: %v, %v", kept, err)
		}
		if !strings.Contains(log.String(), want) {
			t.Errorf("netfilter %v: the log has no %q: %s", netfilter, want, log.String())
		}
	}
}

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
