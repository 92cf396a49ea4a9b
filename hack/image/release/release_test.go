package main

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// newRelease returns a release of this repository with this test as its programs.
func newRelease(t *testing.T) release {
	t.Helper()
	root := filepath.Join("..", "..", "..")
	version, err := os.ReadFile(filepath.Join(root, "VERSION"))
	noError(t, err)
	r := release{root: root, bin: t.TempDir(), dist: filepath.Join(t.TempDir(), "dist"), version: strings.TrimSpace(string(version))}
	program, err := os.Executable()
	noError(t, err)
	for _, arch := range []string{"amd64", "arm64"} {
		dir := filepath.Join(r.bin, "linux-"+arch)
		noError(t, os.Mkdir(dir, 0o755))
		noError(t, os.Link(program, filepath.Join(dir, "spillway")))
		noError(t, os.Link(program, filepath.Join(dir, "spillway-lab")))
		noError(t, os.WriteFile(filepath.Join(r.bin, "image-"+arch+".cdx.json"), []byte("{}"), 0o644))
	}
	noError(t, os.WriteFile(filepath.Join(r.bin, "image.tar"), []byte("image"), 0o644))
	noError(t, os.MkdirAll(filepath.Join(r.bin, "man", "man1"), 0o755))
	noError(t, os.WriteFile(filepath.Join(r.bin, "man", "man1", "spillway.1"), []byte(".TH"), 0o644))
	return r
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r release) file(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(r.dist, name))
	noError(t, err)
	return string(text)
}

func TestAReleaseIsCompleteAndTheSameAgain(t *testing.T) {
	r := newRelease(t)
	noError(t, os.MkdirAll(r.dist, 0o755))
	noError(t, os.WriteFile(filepath.Join(r.dist, "left-over"), nil, 0o644))
	noError(t, r.write())
	sums := r.file(t, "SHA256SUMS")
	var names []string
	for line := range strings.Lines(sums) {
		names = append(names, strings.Fields(line)[1])
	}
	v := r.version
	want := []string{
		"NOTES.md", "spillway-" + v + ".tgz",
		"spillway_" + v + "_image.tar", "spillway_" + v + "_image_amd64.cdx.json", "spillway_" + v + "_image_arm64.cdx.json",
		"spillway_" + v + "_krew.yaml",
		"spillway_" + v + "_linux_amd64.cdx.json", "spillway_" + v + "_linux_amd64.tar.gz",
		"spillway_" + v + "_linux_arm64.cdx.json", "spillway_" + v + "_linux_arm64.tar.gz",
	}
	if !slices.Equal(names, want) {
		t.Errorf("files %q, want %q", names, want)
	}
	check := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	check.Dir = r.dist
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("sha256sum: %v: %s", err, out)
	}
	noError(t, r.write())
	if again := r.file(t, "SHA256SUMS"); again != sums {
		t.Errorf("sums\n%s and\n%s", sums, again)
	}
}

func TestAnArchiveHasBothProgramsThatRun(t *testing.T) {
	r := newRelease(t)
	noError(t, r.write())
	modes := map[string]int64{}
	for _, h := range contents(t, filepath.Join(r.dist, r.name("linux", "arm64")+".tar.gz")) {
		modes[strings.TrimPrefix(h.Name, r.name("linux", "arm64")+"/")] = h.Mode
	}
	for name, want := range map[string]int64{"spillway": 0o755, "spillway-lab": 0o755, "LICENSE": 0o644, "README.md": 0o644,
		"CHANGELOG.md": 0o644, "man/man1/spillway.1": 0o644} {
		if modes[name] != want {
			t.Errorf("%s has mode %o, want %o", name, modes[name], want)
		}
	}
}

// contents returns the headers of an archive's files.
func contents(t *testing.T, path string) (headers []*tar.Header) {
	t.Helper()
	f, err := os.Open(path)
	noError(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	noError(t, err)
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return headers
		}
		noError(t, err)
		headers = append(headers, h)
	}
}

func TestAVersionWithoutASectionIsRefused(t *testing.T) {
	r := newRelease(t)
	r.version = "99.0.0"
	if err := r.write(); err == nil || !strings.Contains(err.Error(), "CHANGELOG.md has no section") {
		t.Errorf("got %v", err)
	}
	got, err := sectionOf("# Changelog\n\n## 2.0.0\n\n- new\n\n## 1.0.0, 2026-01-01\n\n- old\n", "1.0.0")
	if err != nil || got != "- old\n" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestNotesHaveTheCommitsSinceTheLastVersion(t *testing.T) {
	dir := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=x", "-c", "user.email=x@example.com"}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
	}
	r := release{root: dir, version: "0.2.0"}
	git("init", "-q")
	git("commit", "-q", "--allow-empty", "-m", "agent: old")
	if got, err := r.commits(); err != nil || got != "" {
		t.Errorf("before the first version: %q, %v", got, err)
	}
	git("tag", "v0.1.0")
	git("commit", "-q", "--allow-empty", "-m", "agent: new")
	git("tag", "v0.2.0") // the release's own, in a workflow
	got, err := r.commits()
	if err != nil || !strings.Contains(got, "since v0.1.0") || !strings.Contains(got, "- agent: new (") || strings.Contains(got, "old") {
		t.Errorf("%q, %v", got, err)
	}
}
