package docs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// Debian's npm conflicts with another archive's nodejs, which brings an npm of its own.
func TestDepsAcceptsAnotherNode(t *testing.T) {
	script, err := os.ReadFile(filepath.Join(root, "hack", "deps"))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "deps") // t.TempDir is closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"node", "npm", "dpkg-query"} { // dpkg-query knows no package
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("bash", "-s", "ui")
	cmd.Env = []string{"PATH=" + dir + ":/usr/bin:/bin", "HOME=" + dir}
	cmd.Stdin = bytes.NewReader(script)
	if os.Geteuid() == 0 { // so that a failure installs nothing
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivileged, Gid: unprivileged}}
	}
	if out, err := cmd.CombinedOutput(); err != nil || len(out) != 0 {
		t.Errorf("hack/deps ui, with node and npm of no package: %v, %q, want nothing to do", err, out)
	}
}
