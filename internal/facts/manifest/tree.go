package manifest

import (
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

var errNotDir = errors.New("is not a directory")

func statDir(dir string) (inode, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return inode{}, err
	}
	if !info.IsDir() {
		return inode{}, errNotDir
	}
	return stampOf(info).inode, nil
}

// tree is the last read state of the directory, and the objects served from it.
type tree struct {
	dir         string
	log         *slog.Logger
	id          inode
	files       map[string]*file
	filesOf     map[key][]string // files that define an object, sorted
	duplicated  map[key]bool     // objects in several files
	server      map[key]string   // the file that an object is served from
	served      map[key]any      // never nil
	dirty       map[key]bool     // since the last delta
	unavailable *model.Problem   // the directory cannot be read now
	incomplete  map[string]bool  // files to read again
	gracePeriod time.Duration    // time after which a missing file counts as deleted
	missing     map[string]time.Time
	links       []string     // files that are symbolic links, sorted
	unread      model.Unread // as last reported in a Delta
}

func newTree(dir string, log *slog.Logger) *tree {
	return &tree{
		dir: dir, log: log,
		files: map[string]*file{}, filesOf: map[key][]string{}, duplicated: map[key]bool{},
		server: map[key]string{}, served: map[key]any{}, dirty: map[key]bool{}, incomplete: map[string]bool{},
		missing: map[string]time.Time{},
	}
}

// scan reads changed files, and the given files even if they seem unchanged. An error
// means that the directory cannot be read; the tree then stays as it was.
func (t *tree) scan(force map[string]bool) error {
	id, err := statDir(t.dir)
	if err != nil {
		return t.setUnavailable(err, cause(err))
	}
	list, err := os.ReadDir(t.dir)
	if err != nil {
		return t.setUnavailable(err, cause(err))
	}
	next, incomplete := map[string]*file{}, map[string]bool{}
	absent, renamed := t.absent(list), map[string]string{}
	t.links = nil
	for _, d := range list {
		if !isManifest(d.Name()) {
			continue
		}
		if d.Type() == fs.ModeSymlink {
			t.links = append(t.links, d.Name())
		}
		prev := t.files[d.Name()]
		if old := absent.at(filepath.Join(t.dir, d.Name())); prev == nil && old != nil {
			prev, renamed[old.name] = old.as(d.Name()), d.Name()
		}
		f, err := readFile(t.dir, d.Name(), prev, force[d.Name()])
		if errors.Is(err, errIncomplete) {
			incomplete[d.Name()] = true
		}
		if f != nil {
			next[f.name] = f
		}
	}
	// Files that disappeared one by one are deleted. Files that disappeared with their
	// directory are not.
	if again, err := statDir(t.dir); err != nil || again != id {
		return t.setUnavailable(fs.ErrNotExist, "was replaced while it was read")
	}
	// A directory that comes back without any file is an unmounted volume, or a copy that
	// has not started.
	if len(next) == 0 && len(t.files) > 0 && id != t.id {
		return t.setUnavailable(fs.ErrNotExist, "was replaced by an empty directory")
	}
	t.id, t.unavailable, t.incomplete = id, nil, incomplete
	t.keepMissing(absent, renamed, next)
	t.follow(renamed)
	t.replace(next)
	return nil
}

// absent returns the files, by name, that were read once and are not in the directory
// now.
type absent map[string]*file

func (t *tree) absent(list []fs.DirEntry) absent {
	a := maps.Clone(absent(t.files))
	for _, d := range list {
		delete(a, d.Name())
	}
	return a
}

// at returns the absent file that is at path now: it was renamed. An inode that was freed
// and used again looks the same. A new file that cannot be read then keeps the objects of
// a file that was just removed.
func (a absent) at(path string) *file {
	if len(a) == 0 {
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil
	}
	id := stampOf(info).inode
	for _, f := range a {
		if f.inode == id && id != (inode{}) {
			return f
		}
	}
	return nil
}

// keepMissing keeps absent files for a while: an editor may have renamed a file to write
// it again. A file with a new name does not wait.
func (t *tree) keepMissing(a absent, renamed map[string]string, next map[string]*file) {
	now, missing := time.Now(), map[string]time.Time{}
	for name, f := range a {
		since, ok := t.missing[name]
		if !ok {
			since = now
		}
		if renamed[name] == "" && now.Sub(since) < t.gracePeriod {
			missing[name], next[name] = since, f
		}
	}
	t.missing = missing
}

// follow makes the new name of a file serve the objects of the old one, before other
// files that define them.
func (t *tree) follow(renamed map[string]string) {
	for old, name := range renamed {
		for k := range t.files[old].definitions {
			if t.server[k] == old {
				t.server[k] = name
			}
		}
	}
}

// due returns the time until the next missing file counts as deleted; false if none is
// missing.
func (t *tree) due() (time.Duration, bool) {
	if len(t.missing) == 0 {
		return 0, false
	}
	first := slices.MinFunc(slices.Collect(maps.Values(t.missing)), time.Time.Compare)
	return max(0, time.Until(first.Add(t.gracePeriod))), true
}

func (t *tree) setUnavailable(err error, why string) error {
	t.unavailable = &model.Problem{
		Where: t.dir,
		What:  why + "; the last state stays in effect until the directory and its files exist again",
	}
	return err
}

// replace stores the files that were read, and marks their changed objects dirty.
func (t *tree) replace(next map[string]*file) {
	for name, old := range t.files {
		if next[name] == old {
			continue
		}
		for k := range old.definitions {
			if next[name] == nil || !sameDefinition(next[name].definitions, k, old.definitions[k]) {
				t.removeFileOf(k, name)
			}
		}
	}
	for name, f := range next {
		if t.files[name] == f {
			continue
		}
		t.log.Debug("Read manifest", "file", name, "objects", len(f.definitions), "problems", len(f.problems))
		for k, d := range f.definitions {
			if old := t.files[name]; old == nil || !sameDefinition(old.definitions, k, d) {
				t.addFileOf(k, name)
			}
		}
	}
	t.files = next
	t.holdMoved()
	for k := range t.dirty {
		t.chooseServer(k)
	}
}

// holdMoved assigns the last good state of an object without a file to a file that names the
// object, but is unusable. The object was copied or moved, not deleted.
func (t *tree) holdMoved() {
	for _, name := range slices.Sorted(maps.Keys(t.files)) {
		f := t.files[name]
		for k := range f.broken {
			object, served := t.served[k]
			if served && t.dirty[k] && len(t.filesOf[k]) == 0 {
				f.definitions[k] = definition{object: object, held: true}
				t.addFileOf(k, name)
			}
		}
	}
}

func sameDefinition(definitions map[key]definition, k key, d definition) bool {
	other, ok := definitions[k]
	return ok && other.held == d.held && sameObject(other.object, d.object)
}

func sameObject(a, b any) bool {
	return a == b || reflect.DeepEqual(a, b)
}

func (t *tree) addFileOf(k key, name string) {
	t.dirty[k] = true
	names := t.filesOf[k]
	if i, ok := slices.BinarySearch(names, name); !ok {
		names = slices.Insert(names, i, name)
	}
	t.setFilesOf(k, names)
}

func (t *tree) removeFileOf(k key, name string) {
	t.dirty[k] = true
	names := t.filesOf[k]
	if i, ok := slices.BinarySearch(names, name); ok {
		names = slices.Delete(names, i, i+1)
	}
	t.setFilesOf(k, names)
}

func (t *tree) setFilesOf(k key, names []string) {
	delete(t.duplicated, k)
	switch len(names) {
	case 0:
		delete(t.filesOf, k)
		return
	case 1:
	default:
		t.duplicated[k] = true
	}
	t.filesOf[k] = names
}

// chooseServer selects the file that serves an object. The serving file stays. So a copy
// does not replace it, whatever the copy's name, and neither does an error in the serving
// file. Otherwise the first file by name serves, as at the start, and a usable file
// before one that only has a last good state.
func (t *tree) chooseServer(k key) {
	names := t.filesOf[k]
	if len(names) == 0 {
		delete(t.server, k)
		return
	}
	if slices.Contains(names, t.server[k]) {
		return
	}
	usable := func(name string) bool { return !t.files[name].definitions[k].held }
	t.server[k] = names[max(0, slices.IndexFunc(names, usable))]
}

// delta returns the changes of served objects since the last call.
func (t *tree) delta() model.Delta {
	var d model.Delta
	for k := range t.dirty {
		var object any
		if name, ok := t.server[k]; ok {
			object = t.files[name].definitions[k].object
		}
		if sameObject(t.served[k], object) {
			continue
		}
		if object == nil {
			delete(t.served, k)
		} else {
			t.served[k] = object
		}
		put(&d, k, object)
	}
	clear(t.dirty)
	if unread := t.unreadFile(); unread != t.unread {
		t.unread, d.Unread = unread, &unread
	}
	return d
}

// unreadFile returns the first file that could never be read as a whole, if there is one.
func (t *tree) unreadFile() model.Unread {
	out := ""
	for name, f := range t.files {
		if f.unread && (out == "" || name < out) {
			out = name
		}
	}
	if out == "" {
		return model.Unread{}
	}
	return model.Unread{Reason: model.UnreadFile, Text: oneLine(out)}
}

// put adds an object to a Delta; nil means deleted.
func put(d *model.Delta, k key, object any) {
	switch k.kind {
	case "Service":
		enter(&d.Services, k.name, object)
	case "EndpointSlice":
		enter(&d.Slices, k.name, object)
	case "Node":
		enter(&d.Nodes, k.name.Name, object)
	case "Pod":
		enter(&d.Pods, k.name, object)
	case "NetworkPolicy":
		enter(&d.NetworkPolicies, k.name, object)
	case "Namespace":
		enter(&d.Namespaces, k.name.Name, object)
	case "DoNotTrackPolicy":
		enter(&d.DoNotTrackPolicies, k.name.Name, object)
	}
}

func enter[K comparable, V any](m *map[K]*V, name K, object any) {
	if *m == nil {
		*m = map[K]*V{}
	}
	v, _ := object.(*V)
	(*m)[name] = v
}

// problems returns all current problems, by file and document; nil if there are none.
func (t *tree) problems() []model.Problem {
	var out []model.Problem
	if t.unavailable != nil {
		out = append(out, *t.unavailable)
	}
	conflicts := t.conflicts()
	for _, name := range slices.Sorted(maps.Keys(t.files)) {
		out = append(out, t.files[name].problems...)
		out = append(out, conflicts[name]...)
	}
	return out
}

// conflicts reports, for each file, the objects that another file serves.
func (t *tree) conflicts() map[string][]model.Problem {
	out := map[string][]model.Problem{}
	keys := slices.SortedFunc(maps.Keys(t.duplicated), func(a, b key) int {
		return slices.Compare([]string{a.kind, a.name.Namespace, a.name.Name}, []string{b.kind, b.name.Namespace, b.name.Name})
	})
	for _, k := range keys {
		server := t.server[k]
		if _, ok := t.missing[server]; ok {
			continue // most likely the object is being moved
		}
		what := "is also in " + server + ", whose version is served; remove one"
		if t.files[server].definitions[k].held {
			what = "was in " + server + ", whose last valid state is served; fix or remove that file"
		}
		for _, name := range t.filesOf[k] {
			d := t.files[name].definitions[k]
			if name == server || d.held { // another problem reports a held one
				continue
			}
			out[name] = append(out[name], model.Problem{
				Object: k.object(), Where: where(name, d.document, k),
				Field: "metadata.name",
				What:  what,
			})
		}
	}
	return out
}
