package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Tree is a file tree. Its paths are absolute. Every file is owned by root and readable
// by every user; a file is executable by every user if its source is executable by its
// owner. Special permission bits are dropped.
//
// As in Debian, /bin, /sbin, /lib and /lib64 are symbolic links to the directories of
// the same name below /usr. A tree has each link if the directory exists.
type Tree struct {
	// CreatedBy says what made the files, for the history of an image.
	CreatedBy string

	files map[string]file
}

// file is one entry of a tree: a directory, a symbolic link, or data.
type file struct {
	mode fs.FileMode // its type, and the permission 0755 or 0644
	link string      // of a symbolic link
	from string      // the host's file with the data, or empty
	data []byte      // if from is empty
}

var merged = []string{"bin", "lib", "lib64", "sbin"}

// NewTree returns an empty tree.
func NewTree() *Tree { return &Tree{files: map[string]file{}} }

// Write adds a file. mode is its permission.
func (t *Tree) Write(name string, data []byte, mode fs.FileMode) {
	t.put(name, file{mode: permission(mode), data: data})
}

// Link adds a symbolic link.
func (t *Tree) Link(name, target string) {
	t.put(name, file{mode: fs.ModeSymlink, link: target})
}

// Mkdir adds a directory. Directories of other entries need no call.
func (t *Tree) Mkdir(name string) { t.put(name, file{mode: fs.ModeDir | 0o755}) }

// Copy adds a file, a symbolic link or a directory of the host with everything below it.
// The host's files must not change until the image is written.
func (t *Tree) Copy(name, from string) error {
	return filepath.WalkDir(from, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, at)
		if err != nil {
			return err
		}
		to := path.Join(name, filepath.ToSlash(rel))
		switch d.Type() {
		case fs.ModeDir:
			t.Mkdir(to)
		case fs.ModeSymlink:
			target, err := os.Readlink(at)
			if err != nil {
				return err
			}
			t.Link(to, target)
		case 0:
			info, err := d.Info()
			if err != nil {
				return err
			}
			t.put(to, file{mode: permission(info.Mode()), from: at})
		default:
			return fmt.Errorf("copy %s: %s: only files, directories and symbolic links", at, d.Type())
		}
		return nil
	})
}

// Merge adds every file of another tree, which replaces files of the same name.
func (t *Tree) Merge(other *Tree) { maps.Copy(t.files, other.files) }

// Take adds the files of another tree whose names match patterns of [path.Match]. A
// pattern without a match is an error. It does not add what these files need: see
// AddPrograms.
func (t *Tree) Take(from *Tree, patterns ...string) error {
	names, err := from.Match(patterns...)
	for _, name := range names {
		t.files[name] = from.files[name]
	}
	return err
}

// Match returns the sorted names of files that match any of the patterns of [path.Match].
// A pattern without a match is an error.
func (t *Tree) Match(patterns ...string) (names []string, err error) {
	for _, pattern := range patterns {
		pattern = merge(pattern)
		found := 0
		for name, f := range t.files {
			if ok, err := path.Match(pattern, name); err != nil {
				return nil, fmt.Errorf("match %s: %w", pattern, err)
			} else if ok && !f.mode.IsDir() {
				names = append(names, name)
				found++
			}
		}
		if found == 0 {
			return nil, fmt.Errorf("match %s: no such file in the tree", pattern)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Names returns the sorted names of all files and symbolic links.
func (t *Tree) Names() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(t.files)) {
		if !t.files[name].mode.IsDir() {
			names = append(names, name)
		}
	}
	return names
}

func (t *Tree) put(name string, f file) {
	name = merge(name)
	if name == "/" || slices.Contains(merged, name[1:]) {
		return // a link of WriteTo's
	}
	t.files[name] = f
}

// merge returns the clean, absolute form of a name, with /bin and its like below /usr.
func merge(name string) string {
	name = path.Join("/", name)
	first, _, _ := strings.Cut(name[1:], "/")
	if slices.Contains(merged, first) && name != "/"+first {
		return "/usr" + name
	}
	return name
}

func permission(mode fs.FileMode) fs.FileMode {
	if mode&0o100 != 0 {
		return 0o755
	}
	return 0o644
}

func (f file) open() (io.ReadCloser, error) {
	if f.from != "" {
		return os.Open(f.from)
	}
	return io.NopCloser(bytes.NewReader(f.data)), nil
}

// WriteTar writes the tree as a tar archive, sorted by name, with the time 0.
func (t *Tree) WriteTar(w io.Writer) error {
	all := t.withDirectories()
	out := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := writeFile(out, strings.TrimPrefix(name, "/"), all[name]); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
	return out.Close()
}

// withDirectories returns the files with all their directories and the links to /usr.
func (t *Tree) withDirectories() map[string]file {
	all := maps.Clone(t.files)
	for name := range t.files {
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			if _, ok := all[dir]; !ok {
				all[dir] = file{mode: fs.ModeDir | 0o755}
			}
		}
	}
	for _, dir := range merged {
		if _, ok := all["/usr/"+dir]; ok {
			all["/"+dir] = file{mode: fs.ModeSymlink, link: "usr/" + dir}
		}
	}
	return all
}

func writeFile(out *tar.Writer, name string, f file) error {
	h := &tar.Header{Name: name, Mode: int64(f.mode.Perm()), ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	switch f.mode.Type() {
	case fs.ModeDir:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
		return out.WriteHeader(h)
	case fs.ModeSymlink:
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, f.link, 0o777
		return out.WriteHeader(h)
	}
	h.Typeflag, h.Size = tar.TypeReg, int64(len(f.data))
	if f.from != "" {
		info, err := os.Stat(f.from)
		if err != nil {
			return err
		}
		h.Size = info.Size()
	}
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	in, err := f.open()
	if err != nil {
		return err
	}
	defer in.Close()
	_, err = io.Copy(out, in)
	return err
}
