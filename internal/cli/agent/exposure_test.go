package agent

import (
	"log/slog"
	"strings"
	"testing"
)

func TestProfilesForOtherMachinesAreWarnedOf(t *testing.T) {
	for _, c := range []struct {
		profiling bool
		addr      string
		warns     bool
	}{
		{false, "0.0.0.0:10249", false},
		{true, "127.0.0.1:10249", false},
		{true, "[::1]:10249", false},
		{true, "0.0.0.0:10249", true},
		{true, "[::]:10249", true},
		{true, "192.0.2.1:10249", true},
		{true, "", false},
	} {
		var log strings.Builder
		cfg := Config{Profiling: c.profiling, MetricsAddr: c.addr}
		cfg.warnOfExposure(slog.New(slog.NewTextHandler(&log, nil)))
		if got := strings.Contains(log.String(), "--profiling"); got != c.warns {
			t.Errorf("%+v: the log says %q", c, log.String())
		}
	}
}
