// Package netnstest gives tests network namespaces of their own, and runs parts of tests
// in others.
package netnstest

import (
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netns"
)

// Enter moves the test's thread into a new network namespace. The thread stays locked, so
// that it ends with the test. Subtests run on other threads, and so in other namespaces.
func Enter(t testing.TB) (home, own netns.NsHandle) {
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
		own.Close()
		home.Close()
	})
	return home, own
}

// Within runs f in the network namespace of a name (ip netns), on the test's goroutine, so
// that f may end the test.
func Within(t testing.TB, name string, f func()) {
	t.Helper()
	there, err := netns.GetFromName(name)
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	in(t, there, f)
}

// in runs f in a network namespace, on the test's goroutine.
func in(t testing.TB, there netns.NsHandle, f func()) {
	t.Helper()
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	if err := netns.Set(there); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := netns.Set(home); err != nil {
			t.Fatal(err) // with the thread locked, so that it ends with the test
		}
		runtime.UnlockOSThread()
	}()
	f()
}
