package image

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// files returns the headers of a tree's archive, by name.
func files(t *testing.T, tree *Tree) (names []string, headers map[string]*tar.Header) {
	t.Helper()
	var archive bytes.Buffer
	if err := tree.WriteTar(&archive); err != nil {
		t.Fatal(err)
	}
	headers = map[string]*tar.Header{}
	for r := tar.NewReader(&archive); ; {
		h, err := r.Next()
		if err == io.EOF {
			return names, headers
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
		headers[h.Name] = h
	}
}

func TestTheArchiveOfATreeIsSortedAndHasNoTimesOrOwners(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("x"), 0o700); err != nil {
		t.Fatal(err)
	}
	tree := NewTree()
	if err := tree.Copy("/bin/program", program); err != nil {
		t.Fatal(err)
	}
	tree.Write("etc/secret", []byte("s"), 0o600)
	tree.Link("/usr/bin/alias", "program")
	names, headers := files(t, tree)
	want := []string{"bin", "etc/", "etc/secret", "usr/", "usr/bin/", "usr/bin/alias", "usr/bin/program"}
	if !slices.Equal(names, want) {
		t.Errorf("got %q, want %q", names, want)
	}
	for name, h := range headers {
		if h.Uid != 0 || h.Gid != 0 || h.ModTime.Unix() != 0 {
			t.Errorf("%s: owner %d:%d, time %v", name, h.Uid, h.Gid, h.ModTime)
		}
	}
	if m := headers["usr/bin/program"].Mode; m != 0o755 {
		t.Errorf("the program's mode is %o", m)
	}
	if m := headers["etc/secret"].Mode; m != 0o644 {
		t.Errorf("the file's mode is %o", m)
	}
	if l := headers["bin"].Linkname; l != "usr/bin" {
		t.Errorf("/bin leads to %q", l)
	}
}

func TestAPatternWithoutAFileIsAnError(t *testing.T) {
	tree := NewTree()
	tree.Write("/usr/bin/program", nil, 0o755)
	for _, pattern := range []string{"/usr/bin/other", "/usr/sbin/*", "/usr/bin/[", "/usr"} {
		if err := NewTree().AddPrograms(tree, pattern); err == nil {
			t.Errorf("%s: no error", pattern)
		}
	}
}

func TestAMissingLibraryIsAnError(t *testing.T) {
	all, program := NewTree(), "/bin/true"
	if err := all.Copy(program, program); err != nil {
		t.Fatal(err)
	}
	err := NewTree().AddPrograms(all, program)
	if err == nil || !strings.Contains(err.Error(), "not in the tree") && !strings.Contains(err.Error(), "no such file") {
		t.Errorf("got %v", err)
	}
}

func TestTheSameFilesGiveTheSameImage(t *testing.T) {
	digest := func(order ...string) string {
		tree := NewTree()
		for _, name := range order {
			tree.Write(name, []byte(name), 0o644)
		}
		img, err := New(Config{Labels: map[string]string{"a": "1"}}, "arm64", tree)
		if err != nil {
			t.Fatal(err)
		}
		index, err := Index(nil, img)
		if err != nil {
			t.Fatal(err)
		}
		d, err := index.Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d.String()
	}
	if a, b := digest("/x", "/y/z"), digest("/y/z", "/x"); a != b {
		t.Errorf("%s and %s", a, b)
	}
	if digest("/x") == digest("/y") {
		t.Error("other files have the same digest")
	}
}
