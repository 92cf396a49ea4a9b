// Package browser opens pages in chromium, for tests.
package browser

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Run runs Debian's chromium without a window, and returns what it prints. Args are its
// flags and the page.
func Run(t *testing.T, args ...string) string {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("find a browser: %v: run \"hack/deps test\"", err)
	}
	// Limits a browser that hangs; a run takes about 2 s.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append([]string{"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--user-data-dir=" + t.TempDir()}, args...)...)
	cmd.WaitDelay = 5 * time.Second
	var messages strings.Builder
	cmd.Stderr = &messages
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("run chromium: %v: %s", err, messages.String())
	}
	return string(out)
}
