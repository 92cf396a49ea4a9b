package manifest

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

// fresh is the time after its last change in which a file may change without a new time
// stamp. Some file systems count time in steps of 2 s.
const fresh = 2 * time.Second

type sum = [sha256.Size]byte

// inode identifies a file or directory, independent of its path.
type inode struct{ dev, ino uint64 }

// stamp shows whether a file may have changed, without reading it.
type stamp struct {
	inode
	size         int64
	mtime, ctime int64 // ns since 1970
}

func stampOf(info fs.FileInfo) stamp {
	s := stamp{size: info.Size(), mtime: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode, s.ctime = inode{uint64(st.Dev), st.Ino}, st.Ctim.Nano()
	}
	return s
}

// file is the present and the last good content of one file.
type file struct {
	name        string
	inode       inode // of the file last found at its path, read or not
	stamp       stamp // zero if it could not be read, so the next scan retries
	read        time.Time
	sum         sum
	docs        map[sum][]entry // by hash of the text: only changed documents are decoded again
	definitions map[key]definition
	broken      map[key]bool // objects that it names, but that are unusable
	problems    []model.Problem
	// unread reports that the file could never be read as a whole, so that its content
	// for an earlier agent is unknown. It is not set for kinds that policies do not
	// depend on.
	unread bool
}

// as returns the content of the file under a new name, where it has to be read again.
func (f *file) as(name string) *file {
	return &file{name: name, inode: f.inode, docs: f.docs, definitions: f.definitions, unread: f.unread}
}

// definition is one file's definition of an object.
type definition struct {
	object   any // nil: nothing to serve
	document int
	held     bool // the last good state; the present content is unusable
}

// isManifest reports whether the agent reads a file of this name.
func isManifest(name string) bool {
	if strings.HasPrefix(name, ".") {
		return false
	}
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

var errIncomplete = errors.New("file is being written")

// readFile reads one file of dir again, unless it seems unchanged. It returns nil if it
// is not a regular file, and prev if nothing changed. errIncomplete reports that a
// program wrote to the file meanwhile, or that the file disappeared since the directory
// was listed. It may have been renamed, or may come back.
func readFile(dir, name string, prev *file, force bool) (*file, error) {
	path := filepath.Join(dir, name)
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Lstat(path); err != nil {
			return prev, errIncomplete
		}
		return failed(name, prev, "is a symbolic link to a file that does not exist"), nil
	case err != nil:
		return failed(name, prev, "cannot be read: "+cause(err)), nil
	case info.IsDir():
		return nil, nil
	case !info.Mode().IsRegular():
		return failed(name, prev, "is not a regular file; remove it"), nil
	case prev != nil && !force && prev.stamp == stampOf(info) && prev.read.Sub(info.ModTime()) > fresh:
		return prev, nil
	}
	f, err := readContent(path, name, prev)
	f.inode = stampOf(info).inode
	return f, err
}

func readContent(path, name string, prev *file) (*file, error) {
	now := time.Now()
	// Not blocking: a FIFO may have replaced the file meanwhile.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return failed(name, prev, "cannot be read: "+cause(err)), nil
	}
	defer f.Close()
	before, err := f.Stat()
	if err != nil {
		return failed(name, prev, "cannot be read: "+cause(err)), nil
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFileSize+1))
	switch {
	case err != nil:
		return failed(name, prev, "cannot be read: "+cause(err)), nil
	case len(data) > maxFileSize:
		return failed(name, prev, fmt.Sprintf("is larger than %d MiB; split it", maxFileSize>>20)), nil
	case len(data) == 0:
		return failed(name, prev, "is empty; remove the file if its objects are to go"), nil
	}
	after, err := f.Stat()
	if prev != nil && (err != nil || stampOf(before) != stampOf(after)) {
		return prev, errIncomplete
	}
	h := sha256.Sum256(data)
	if prev != nil && prev.stamp != (stamp{}) && prev.sum == h {
		prev.stamp, prev.read = stampOf(before), now
		return prev, nil
	}
	next := parse(name, data, prev)
	next.stamp, next.read, next.sum = stampOf(before), now, h
	return next, nil
}

// cause returns the reason in err without the path, which is in Where already.
func cause(err error) string {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return err.Error()
}

// failed returns a file without usable content: its last good content stays.
func failed(name string, prev *file, what string) *file {
	f := &file{name: name, definitions: map[key]definition{}, unread: prev == nil || prev.unread}
	if prev != nil {
		f.docs = prev.docs
	}
	f.problems = []model.Problem{{Where: name, What: what}}
	f.hold(prev, unusable{all: true})
	return f
}

// parse decodes a file. prev, which may be nil, has the documents that were decoded
// before and the last good objects.
func parse(name string, data []byte, prev *file) *file {
	f := &file{name: name, docs: map[sum][]entry{}, definitions: map[key]definition{}}
	isJSON := filepath.Ext(name) == ".json"
	chunks := []chunk{{text: data}}
	if !isJSON {
		chunks = split(data)
	}
	lost := unusable{names: map[string]bool{}, keys: map[key]bool{}}
	for i, c := range chunks {
		entries := f.entries(c.text, isJSON, prev)
		for j := range entries {
			e := &entries[j]
			f.report(e, i+1, c.line)
			switch e.state {
			case good:
				f.define(e, i+1)
			case bad:
				lost.add(e.key)
			}
		}
	}
	f.broken = lost.keys
	f.unread = lost.mayHavePolicies() && (prev == nil || prev.unread)
	f.hold(prev, lost)
	version := sha256.Sum256(data)
	for i := range f.problems {
		f.problems[i].Version = hex.EncodeToString(version[:8])
	}
	return f
}

// entries decodes a document, or returns it from the decoded ones.
func (f *file) entries(text []byte, isJSON bool, prev *file) []entry {
	h := sha256.Sum256(text)
	entries, ok := f.docs[h]
	if !ok && prev != nil {
		entries, ok = prev.docs[h]
	}
	if !ok {
		entries = decode(text, isJSON)
	}
	f.docs[h] = entries
	return entries
}

func (f *file) define(e *entry, document int) {
	if first, ok := f.definitions[e.key]; ok {
		f.problems = append(f.problems, model.Problem{
			Object: e.key.object(), Where: where(f.name, document, e.key),
			Field: "metadata.name",
			What:  fmt.Sprintf("is also in document %d, which is served; remove one", first.document),
		})
		return
	}
	f.definitions[e.key] = definition{object: e.object, document: document}
}

// hold keeps the last good objects that an unusable entry may define.
func (f *file) hold(prev *file, lost unusable) {
	if prev == nil {
		return
	}
	for k, d := range prev.definitions {
		if _, ok := f.definitions[k]; !ok && lost.holds(k) {
			f.definitions[k] = definition{object: d.object, document: d.document, held: true}
		}
	}
}

// unusable describes the entries that cannot be used. The less of its identity an entry
// shows, the more objects it may be.
type unusable struct {
	all   bool            // not even a name
	names map[string]bool // a name, but no kind
	keys  map[key]bool
}

func (u *unusable) add(k key) {
	switch {
	case k.name.Name == "":
		u.all = true
	case k.kind == "":
		u.names[k.name.Name] = true
	default:
		u.keys[k] = true
	}
}

func (u *unusable) holds(k key) bool {
	return u.all || u.names[k.name.Name] || u.keys[k]
}

// mayHavePolicies reports whether an entry may be a do-not-track policy, or an object
// that decides what a policy selects.
func (u *unusable) mayHavePolicies() bool {
	for k := range u.keys {
		switch k.kind {
		case "DoNotTrackPolicy", "Pod", "Namespace", "Node":
			return true
		}
	}
	return u.all || len(u.names) > 0
}

func (f *file) report(e *entry, document, line int) {
	for _, p := range e.problems {
		what := p.what
		if p.line > 0 {
			what = fmt.Sprintf("line %d %s", line+p.line, what)
		}
		f.problems = append(f.problems, model.Problem{
			Object: e.key.object(), Where: where(f.name, document, e.key), Field: oneLine(p.field), What: oneLine(what),
		})
	}
}

// oneLine removes from a field's name, which may be any text, characters that would break
// the report's line or control a terminal.
func oneLine(s string) string {
	return clip(kubeobject.Printable(s))
}

// where names the document to open, and the object in it.
func where(file string, document int, k key) string {
	s := fmt.Sprintf("%s, document %d", file, document)
	if k.kind != "" && k.name.Name != "" {
		s += " (" + k.String() + ")"
	}
	return oneLine(s)
}
