package harness

import (
	"os"
	"testing"
)

func TestKernelThreadsAreToldByTheirFlags(t *testing.T) {
	for stat, want := range map[string]bool{
		"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 5 0 0 20 0":       true,
		"36 (a) b) (c) I 2 0 0 0 -1 69238880 0 0 0 0 0 0 0 0":          true,
		"4047 (memcached) S 1 4047 4047 0 -1 4194560 2417 0 0 0 3 5 0": false,
		"":            false,
		"7 (x) S 1 2": false,
	} {
		if got := isKernelThread(stat); got != want {
			t.Errorf("%q: %v, want %v", stat, got, want)
		}
	}
	second, _ := os.ReadFile("/proc/2/stat")
	machine := isKernelThread(string(second)) // a container sees no kernel threads
	if ran, err := kernelThreads(); err != nil || ran > 0 != machine {
		t.Errorf("kernel threads ran for %v s: %v; the machine's processes are seen: %v", ran, err, machine)
	}
}
