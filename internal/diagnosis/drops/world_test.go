package drops

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/test/await"
)

// newNamespace creates a named network namespace until the test ends, and runs a script
// in it.
func newNamespace(t *testing.T, role, script string) conntrack.Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	name := fmt.Sprintf("spw-drops-%d-%s", os.Getpid(), role)
	shell(t, "ip netns add "+name+"; ip -n "+name+" link set lo up")
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	list, _ := conntrack.Namespaces()
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(name) })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, list)
	}
	if script != "" {
		shell(t, fmt.Sprintf("ip netns exec %s sh -ec '%s'", name, theIP(t)+script))
	}
	return list[i]
}

// theIP has a script use iproute2's ip: busybox's shell prefers its own.
func theIP(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("ip")
	if err != nil {
		t.Fatal(err)
	}
	return "ip() { " + path + " \"$@\"; }\n"
}

func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", theIP(t)+script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// follow starts a Follower, until the test ends.
func follow(t *testing.T, c Config) *Follower {
	t.Helper()
	f, err := Follow(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	for _, line := range f.Missing() {
		t.Logf("not told on this kernel: %s", line)
	}
	return f
}

// patience limits the wait for an expected drop.
const patience = await.Limit

// next waits for a drop for which is returns true, and prints the others if none comes.
func next(t *testing.T, f *Follower, is func(Drop) bool) Drop {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	var others []string
	for {
		d, err := f.Next(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("no such drop; there were: %s", strings.Join(others, "; "))
		}
		if err != nil {
			t.Fatal(err)
		}
		if is(d) {
			return d
		}
		others = append(others, fmt.Sprintf("%s %s %v:%d at %s", d.Reason, d.TCPFlags, d.Destination, d.DestinationPort, d.Location))
	}
}

// traced reports whether netfilter's functions can be traced on this kernel.
func (f *Follower) traced() bool { return len(f.links) > 3 }

// inPod starts a process in a namespace with a host name of its own.
func inPod(t *testing.T, n conntrack.Namespace, name string) (stop func()) {
	t.Helper()
	cmd := exec.Command("ip", "netns", "exec", n.Names[0], "unshare", "--uts", "sh", "-ec",
		"echo "+name+" >/proc/sys/kernel/hostname; echo ready; exec sleep 60")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}
