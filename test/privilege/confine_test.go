package privilege

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// confineVariable names the file with the confinement of a process that is this
// test's binary and is about to become another program.
const confineVariable = "SPILLWAY_TEST_CONFINE"

// confinement is what a process may do.
type confinement struct {
	// Program replaces this process, with the arguments of this process.
	Program string
	// Capabilities are the only ones left, without "CAP_". Nil leaves all.
	Capabilities []string
	// Netns leaves the names of network namespaces visible, with Capabilities.
	Netns bool
	// Seccomp is an OCI seccomp profile; empty loads none.
	Seccomp string
}

// confineIfAsked turns this process into the confined program if the environment
// asks for it. It returns otherwise.
func confineIfAsked() {
	file := os.Getenv(confineVariable)
	if file == "" {
		return
	}
	var c confinement
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err == nil {
		err = c.exec()
	}
	fmt.Fprintln(os.Stderr, "confine:", err)
	os.Exit(126)
}

func (c confinement) exec() error {
	runtime.LockOSThread() // capabilities and filters belong to a thread; exec keeps this one
	if err := os.Unsetenv(confineVariable); err != nil {
		return err
	}
	if c.Capabilities != nil {
		if err := hideOthers(c.Netns); err != nil {
			return err
		}
		if err := keepOnly(c.Capabilities); err != nil {
			return err
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	if c.Seccomp != "" {
		if err := loadProfile(c.Seccomp); err != nil {
			return err
		}
	}
	return unix.Exec(c.Program, append([]string{c.Program}, os.Args[1:]...), os.Environ())
}

// hideOthers gives this process a view of the machine as a container's: neither names
// of network namespaces, unless showNetns is true, nor processes that it may not trace.
func hideOthers(showNetns bool) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate mounts: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, "hidepid=2"); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if showNetns {
		return nil
	}
	if err := unix.Mount("none", "/run/netns", "tmpfs", 0, ""); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("hide /run/netns: %w", err)
	}
	return nil
}

// keepOnly drops all other capabilities from the bounding set, from which root
// takes its permitted set at exec, and from the other sets.
func keepOnly(names []string) error {
	keep := map[int]bool{}
	for _, name := range names {
		n, ok := capabilities[name]
		if !ok {
			return fmt.Errorf("capability %q is unknown to this test", name)
		}
		keep[n] = true
	}
	for n := range unix.CAP_LAST_CAP + 1 {
		if keep[n] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("drop capability %d: %w", n, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	return nil
}

// capabilities maps the names in this package to capability numbers.
var capabilities = map[string]int{
	"BPF": unix.CAP_BPF, "DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "NET_ADMIN": unix.CAP_NET_ADMIN,
	"NET_BROADCAST": unix.CAP_NET_BROADCAST, "NET_RAW": unix.CAP_NET_RAW, "PERFMON": unix.CAP_PERFMON,
	"SYSLOG": unix.CAP_SYSLOG, "SYS_ADMIN": unix.CAP_SYS_ADMIN, "SYS_MODULE": unix.CAP_SYS_MODULE, "SYS_PTRACE": unix.CAP_SYS_PTRACE,
}

// wrapper is a program that runs the agent confined as its file says at each start.
type wrapper struct {
	path   string // what to start instead of the agent
	file   string // holds the confinement
	binary string
	t      *testing.T
	kept   confinement
}

// newWrapper makes a wrapper around a program. It confines nothing yet.
func newWrapper(t *testing.T, binary string) *wrapper {
	t.Helper()
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	w := &wrapper{path: filepath.Join(dir, "spillway"), file: filepath.Join(dir, "confinement.json"), binary: binary, t: t}
	script := fmt.Sprintf("#!/bin/sh\n%s='%s' exec '%s' \"$@\"\n", confineVariable, w.file, self)
	if err := os.WriteFile(w.path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	w.confine(confinement{})
	return w
}

// confine is for all later starts.
func (w *wrapper) confine(c confinement) {
	w.kept = c
	w.write(c)
}

// release gives all rights to later starts, until restore.
func (w *wrapper) release() { w.write(confinement{}) }

func (w *wrapper) restore() { w.write(w.kept) }

func (w *wrapper) write(c confinement) {
	w.t.Helper()
	c.Program = w.binary
	text, err := json.Marshal(c)
	if err == nil {
		err = os.WriteFile(w.file, text, 0o644)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// effective reads the effective capabilities from a file /proc/.../status.
func effective(status string) (mask uint64, err error) {
	text, err := os.ReadFile(status)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			_, err = fmt.Sscanf(strings.TrimSpace(value), "%x", &mask)
			return mask, err
		}
	}
	return 0, fmt.Errorf("read %s: no CapEff", status)
}

// maskOf is the bit mask of capabilities.
func maskOf(names []string) (mask uint64) {
	for _, name := range names {
		mask |= 1 << capabilities[name]
	}
	return mask
}
