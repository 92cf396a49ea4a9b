package kernel

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const dropVariable = "SPILLWAY_TEST_DROP_CAPABILITY"

// TestCapabilitiesAreDroppedFromAllThreads drops a capability in another process, which
// runs this test again.
func TestCapabilitiesAreDroppedFromAllThreads(t *testing.T) {
	needRoot(t)
	if os.Getenv(dropVariable) == "" {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestCapabilitiesAreDroppedFromAllThreads$", "-test.v")
		cmd.Env = append(os.Environ(), dropVariable+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	hold := make(chan bool)
	defer close(hold)
	for range 4 {
		ready := make(chan bool)
		go func() {
			runtime.LockOSThread() // a thread of its own
			close(ready)
			<-hold
		}()
		<-ready
	}
	if have, err := HaveCapability(unix.CAP_SYS_ADMIN); err != nil || !have {
		t.Fatalf("root has SYS_ADMIN: %v, %v", have, err)
	}
	for range 2 {
		err := DropCapabilities(unix.CAP_SYS_ADMIN, unix.CAP_PERFMON)
		if errors.Is(err, unix.ENOTSUP) {
			t.Skip("needs CGO_ENABLED=0, which the Makefile sets: a binary with cgo cannot reach all its threads")
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	threads, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(threads) < 5 {
		t.Fatalf("%d threads (%v)", len(threads), err)
	}
	want := sets(t, "/proc/thread-self/status")
	for _, thread := range threads {
		if got := sets(t, thread); got != want {
			t.Errorf("%s: %s, want %s", thread, got, want)
		}
	}
	for c, want := range map[int]bool{unix.CAP_SYS_ADMIN: false, unix.CAP_PERFMON: false, unix.CAP_NET_ADMIN: true, unix.CAP_BPF: true} {
		if have, err := HaveCapability(c); err != nil || have != want {
			t.Errorf("capability %d: %v (%v), want %v", c, have, err, want)
		}
	}
}

// sets are the permitted and effective sets in a status file.
func sets(t *testing.T, file string) (found string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "CapPrm:") || strings.HasPrefix(line, "CapEff:") {
			found += strings.TrimSpace(line) + " "
		}
	}
	return found
}
