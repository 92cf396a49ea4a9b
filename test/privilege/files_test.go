package privilege

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestFilesOfAnAgentAreRootsAlone looks at modes of pins, locks and the API's socket while an
// agent of each mode serves.
func TestFilesOfAnAgentAreRootsAlone(t *testing.T) {
	m := mode{"ebpf", ""}
	n := newNode(t, m, 1)
	n.confine(confinement{Capabilities: granted(t, m.name)})
	if err := n.restart(m.name, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	seen := 0
	err := filepath.WalkDir(n.Agent("a").BPFFS, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // a pin that was replaced
		}
		if err != nil {
			return err
		}
		seen++
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil || seen < 20 {
		t.Errorf("%d pins were looked at (%v)", seen, err)
	}
	socket := n.Agent("a").Socket()
	if info, err := os.Lstat(socket); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("%s: %v (%v)", socket, info, err)
	}
	locks, err := filepath.Glob("/run/spillway/*.lock")
	if err != nil || len(locks) < 2 {
		t.Fatalf("locks: %v (%v)", locks, err)
	}
	for _, lock := range locks {
		text, err := os.ReadFile(lock)
		if err != nil || !strings.Contains(string(text), n.Agent("a").BPFFS) {
			continue // another instance's
		}
		if info, err := os.Stat(lock); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v (%v)", lock, info.Mode(), err)
		}
	}
}
