package cluster

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A program may make a plain directory beside the mounts of cgroup v1, where earlier nodes
// left plain files.
func TestDownRemovesWhatLiesInAPlainDirectory(t *testing.T) {
	mount := t.TempDir()
	kept := filepath.Join(mount, "plain", cgroupParent, "other", "node0", "cgroup.procs")
	for _, file := range []string{filepath.Join(mount, "plain", cgroupParent, "gone", "node0", "cgroup.procs"), kept} {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("0\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := removeCgroups(mount, "gone"); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(mount, "plain", cgroupParent, "*", "*", "*")); len(left) != 1 || left[0] != kept {
		t.Errorf("left: %q, want %s alone", left, kept)
	}
}

// The programs of a cluster take minutes to build, so the image is looked for first.
func TestUpLooksForTheImageFirst(t *testing.T) {
	image := filepath.Join(t.TempDir(), "image.tar")
	var steps strings.Builder
	_, err := Up(context.Background(), Config{Name: "no-image", Image: image, Out: &steps})
	if err == nil || !strings.Contains(err.Error(), `run "make image"`) || !strings.Contains(err.Error(), image) || steps.Len() > 0 {
		t.Errorf("%v after %q", err, &steps)
	}
}

// The command in cmd/cluster calls Up where no network is.
func TestUpBuildsNothingAfterPrepare(t *testing.T) {
	dir := t.TempDir()
	var cfg Config
	for _, name := range cfg.needed() {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []Prepared{
		{Programs: dir, Archives: []string{filepath.Join(dir, "missing")}},
		{Programs: filepath.Join(dir, "missing")},
	} {
		var steps strings.Builder
		c, err := Up(t.Context(), Config{Name: "prepared", Image: "no image", Prepared: &p, Out: &steps})
		_ = c.Down() // of a cluster that should not be
		if err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "missing")) || steps.Len() > 0 {
			t.Errorf("%+v: %v after %q, want an error that names what is missing", p, err, &steps)
		}
	}
}
