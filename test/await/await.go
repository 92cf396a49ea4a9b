// Package await waits for conditions in tests.
package await

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// Limit ends a test that hangs. It says nothing about how long something may take.
const Limit = 3 * time.Minute

// True ends the test unless is returns true before Limit. The failure names what, which is
// what the test waits for.
func True(t testing.TB, what string, is func() bool) {
	t.Helper()
	NoError(t, func() error {
		if is() {
			return nil
		}
		return errors.New(what)
	})
}

// NoError ends the test unless check returns nil before Limit. The failure has its last error.
func NoError(t testing.TB, check func() error) {
	t.Helper()
	if err := Error(check); err != nil {
		t.Fatal(err)
	}
}

// Error repeats check until it returns nil, or returns its last error after Limit. The pauses
// grow with the time that has passed: a check may start programs, on a machine that is busy.
func Error(check func() error) error {
	for began := time.Now(); ; {
		err := check()
		if err == nil {
			return nil
		}
		waited := time.Since(began)
		if waited > Limit {
			return fmt.Errorf("not after %v: %w", waited.Round(time.Second), err)
		}
		time.Sleep(min(max(waited/8, time.Millisecond), 200*time.Millisecond))
	}
}
