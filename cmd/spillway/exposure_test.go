package main

import (
	"log/slog"
	"os"
	"path/filepath"
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
		cfg := agentConfig{Profiling: c.profiling, MetricsAddr: c.addr}
		cfg.warnOfExposure(slog.New(slog.NewTextHandler(&log, nil)))
		if got := strings.Contains(log.String(), "--profiling"); got != c.warns {
			t.Errorf("%+v: the log says %q", c, log.String())
		}
	}
}

// A user without root who could open the lock could hold it, and no agent would start.
func TestOnlyRootCanOpenTheLocks(t *testing.T) {
	dir := t.TempDir()
	_, old := instanceFile(dir, filepath.Join(dir, "bpffs"), ".lock")
	if err := os.WriteFile(old, nil, 0o644); err != nil { // of an older agent
		t.Fatal(err)
	}
	lock, err := lockInstance(dir, filepath.Join(dir, "bpffs"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.release()
	if len(lock.files) != 2 {
		t.Fatalf("%d locks", len(lock.files))
	}
	for _, f := range lock.files {
		if info, err := f.Stat(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v (%v)", f.Name(), info.Mode(), err)
		}
	}
}
