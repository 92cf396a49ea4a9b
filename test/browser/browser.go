// Package browser opens pages in chromium, for tests.
package browser

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A run takes about 2 s. At times the browser itself hangs, with the same page and flags.
const (
	hangs    = 40 * time.Second
	attempts = 3
)

// Run runs Debian's chromium without a window, and returns what it prints. Args are its
// flags and the page. A browser that hangs is started again.
func Run(t *testing.T, args ...string) string {
	t.Helper()
	program := find(t)
	for attempt := 1; ; attempt++ {
		out, messages, err := run(t, program, args)
		switch {
		case err == nil:
			return out
		case attempt == attempts || !errors.Is(err, context.DeadlineExceeded):
			t.Fatalf("run chromium: %v: %s", err, messages)
		}
		t.Logf("chromium has hung for %s, and is started again", hangs)
	}
}

// find returns Debian's chromium without windows. That with windows has hung before its first picture, on
// a busy machine.
func find(t *testing.T) string {
	t.Helper()
	program, err := exec.LookPath("chromium-headless-shell")
	if err != nil {
		t.Fatalf("find a browser: %v: run \"hack/deps browser\"", err)
	}
	return program
}

func run(t *testing.T, program string, args []string) (out, messages string, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), hangs)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append([]string{"--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--user-data-dir=" + t.TempDir()},
		args...)...)
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err = cmd.Run(); err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return stdout.String(), stderr.String(), err
}
