package image

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// AddPrograms takes the files that match the patterns of [path.Match] out of another
// tree, with the symbolic links that lead to them, the loader, and every shared library
// that they need. A library that the other tree lacks is an error. Modules that a
// program loads by name at run time are not found: name them in a pattern.
func (t *Tree) AddPrograms(from *Tree, patterns ...string) error {
	names, err := from.Match(patterns...)
	if err != nil {
		return err
	}
	libraries := from.libraries()
	for len(names) > 0 {
		name := names[0]
		names = names[1:]
		if _, have := t.files[name]; have {
			continue
		}
		f, ok := from.files[name]
		if !ok {
			return fmt.Errorf("add %s: no such file in the tree", name)
		}
		t.files[name] = f
		if f.mode&fs.ModeSymlink != 0 {
			names = append(names, follow(name, f.link))
			continue
		}
		needed, interpreter, err := f.needs()
		if err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
		if interpreter != "" {
			names = append(names, merge(interpreter))
		}
		for _, library := range needed {
			at, ok := libraries[library]
			if !ok {
				return fmt.Errorf("add %s: it needs %s, which is not in the tree: add the package that has it", name, library)
			}
			names = append(names, at)
		}
	}
	return nil
}

// libraries returns where the loader looks for shared libraries, by their names. Trees
// of one architecture have one library of each name.
func (t *Tree) libraries() map[string]string {
	found := map[string]string{}
	for _, name := range t.Names() {
		dir, base := path.Split(name)
		dir = strings.TrimSuffix(dir, "/")
		if strings.Contains(base, ".so") && (path.Dir(dir) == "/usr/lib" || slices.Contains([]string{"/usr/lib", "/usr/lib64"}, dir)) {
			if _, ok := found[base]; !ok {
				found[base] = name
			}
		}
	}
	return found
}

// needs returns the shared libraries and the loader that a file names. A file of
// another kind needs nothing.
func (f file) needs() (libraries []string, interpreter string, err error) {
	if f.mode.IsDir() {
		return nil, "", nil
	}
	in, err := f.open()
	if err != nil {
		return nil, "", err
	}
	defer in.Close()
	data, err := io.ReadAll(in)
	if err != nil {
		return nil, "", err
	}
	program, err := elf.NewFile(bytes.NewReader(data))
	var format *elf.FormatError
	if errors.As(err, &format) || errors.Is(err, io.EOF) {
		return nil, "", nil
	} else if err != nil {
		return nil, "", err
	}
	for _, p := range program.Progs {
		if p.Type == elf.PT_INTERP {
			text, err := io.ReadAll(p.Open())
			if err != nil {
				return nil, "", err
			}
			interpreter = string(bytes.TrimRight(text, "\x00"))
		}
	}
	libraries, err = program.ImportedLibraries()
	return libraries, interpreter, err
}

// follow returns the name that a symbolic link leads to.
func follow(name, target string) string {
	if !path.IsAbs(target) {
		target = path.Join(path.Dir(name), target)
	}
	return merge(target)
}
