// Package netnstest gives tests network namespaces of their own.
package netnstest

import (
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netns"
)

// Enter moves the test's thread into a new network namespace until the test
// ends. Subtests run on other threads, and so in other namespaces.
func Enter(t *testing.T) (home, own netns.NsHandle) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	if own, err = netns.New(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Set(home); err != nil {
			t.Fatal(err) // with the thread locked, so that it ends with the test
		}
		own.Close()
		home.Close()
		runtime.UnlockOSThread()
	})
	return home, own
}
