package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// unprivileged is the user id of Debian's unprivileged user.
const unprivileged = 65534

// A verb that needs root must say so before it spends a minute on building.
func TestMakeAsksForRootFirst(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "makefile") // t.TempDir is closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "Makefile"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"demo", "bench", "test"} {
		cmd := exec.Command("make", "--no-print-directory", "-C", dir, verb)
		if os.Geteuid() == 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivileged, Gid: unprivileged}}
		}
		out, err := cmd.CombinedOutput()
		first, rest, _ := strings.Cut(string(out), "\n")
		if want := "make " + verb + ": not root: run it as root"; err == nil || first != want || strings.Contains(rest, "go ") {
			t.Errorf("make %s: %v, %q, want %q first and nothing built", verb, err, out, want)
		}
	}
}
