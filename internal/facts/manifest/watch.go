package manifest

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A burst of changes is read once, when it has been quiet for quietFor or has lasted
// mostFor. An editor's rename and write, or a git checkout, is one change, also if a scan
// falls in between. A file counts as deleted once it has been missing for goneFor.
const (
	quietFor = 50 * time.Millisecond
	mostFor  = 500 * time.Millisecond
	goneFor  = 500 * time.Millisecond
)

// watch follows a directory by inotify or, where that does not work, by polling.
type watch struct {
	source   *Source
	dir      string
	notify   *fsnotify.Watcher // nil if not available
	followed inode             // the directory that notify reports about
	targets  map[string]bool   // directories of the targets of links
	dirty    map[string]bool   // files named by events
	since    time.Time         // start of the burst; zero if there is none
	timer    *time.Timer
	scanned  time.Time
}

func newWatch(s *Source) *watch {
	w := &watch{source: s, dir: filepath.Clean(s.config.Dir), dirty: map[string]bool{}, timer: time.NewTimer(time.Hour)}
	w.timer.Stop()
	var err error
	if w.notify, err = fsnotify.NewWatcher(); err != nil {
		w.notify = nil
		s.log.Warn("Cannot watch manifests, so they are polled; raise fs.inotify.max_user_instances", "err", err)
	}
	return w
}

func (w *watch) close() {
	w.timer.Stop()
	if w.notify != nil {
		w.notify.Close()
	}
}

// follow makes inotify watch the directory that is at the path now, and reports whether
// it is another directory than before.
func (w *watch) follow() bool {
	id, err := statDir(w.dir)
	if err != nil {
		changed := w.followed != inode{}
		w.followed = inode{}
		return changed
	}
	if id == w.followed {
		return false
	}
	if w.notify != nil {
		_ = w.notify.Remove(w.dir) // the watch of the directory before, if there is one
		if err := w.notify.Add(w.dir); err != nil {
			w.source.log.Debug("Cannot watch manifests yet", "err", err)
			return true // and again at the next check
		}
	}
	if again, err := statDir(w.dir); err == nil && again == id {
		w.followed = id
	}
	return true
}

// followLinks makes inotify watch the directories of link targets, so that it reports a
// target's change as a file's. It does not watch links on the path to a target.
func (w *watch) followLinks(t *tree) {
	if w.notify == nil {
		return
	}
	w.targets = map[string]bool{}
	dirs, known := map[string]bool{}, map[inode]bool{w.followed: true}
	for _, name := range t.links {
		path := filepath.Join(w.dir, name)
		if to, err := os.Readlink(path); err != nil || strings.HasPrefix(to, "..data/") {
			continue // of a ConfigMap, whose link ..data is swapped
		}
		target, err := filepath.EvalSymlinks(path)
		if err != nil {
			continue
		}
		w.targets[target] = true
		dir := filepath.Dir(target)
		if id, err := statDir(dir); err == nil && !known[id] {
			dirs[dir], known[id] = true, true
		}
	}
	for _, dir := range w.notify.WatchList() {
		if dir != w.dir && !dirs[dir] {
			_ = w.notify.Remove(dir)
		}
		delete(dirs, dir)
	}
	for dir := range dirs {
		if err := w.notify.Add(dir); err != nil {
			w.source.log.Debug("Cannot watch where a link leads", "dir", dir, "err", err)
			continue // it is polled
		}
		w.arm() // for changes before the watch
	}
}

// run reads the tree again after each burst of changes, until ctx ends.
func (w *watch) run(ctx context.Context, t *tree, e *emitter) {
	check := time.NewTicker(w.source.check)
	defer check.Stop()
	var events chan fsnotify.Event
	var failures chan error
	if w.notify != nil {
		events, failures = w.notify.Events, w.notify.Errors
	}
	t.gracePeriod, w.scanned = goneFor, time.Now()
	w.followLinks(t)
	for {
		select {
		case <-ctx.Done():
			return
		case ev, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			w.event(ev)
		case err, ok := <-failures: // the kernel's queue overflowed: anything may have changed
			if !ok {
				failures = nil
				continue
			}
			w.source.log.Debug("Lost track of manifest changes", "err", err)
			w.arm()
		case <-check.C:
			if w.follow() || w.notify == nil || t.unavailable != nil || time.Since(w.scanned) >= w.source.config.Poll {
				w.arm()
			}
		case <-w.timer.C:
			w.scan(t, e)
		}
	}
}

// event records possible changes. Files that are not read cause no work, except names
// that begin with "..". A kubelet swaps the link ..data to change all of a mounted
// ConfigMap at once.
func (w *watch) event(ev fsnotify.Event) {
	if w.targets[filepath.Clean(ev.Name)] {
		w.arm()
		return
	}
	name := filepath.Base(ev.Name)
	itself := filepath.Clean(ev.Name) == w.dir
	if !itself && filepath.Dir(ev.Name) != w.dir {
		return // another file beside a link's target
	}
	if !itself && !isManifest(name) && !strings.HasPrefix(name, "..") {
		return
	}
	if itself && ev.Has(fsnotify.Remove|fsnotify.Rename) {
		w.followed = inode{}
	}
	w.dirty[name] = true
	w.arm()
}

// arm sets the timer: it waits for quiet, but not for ever.
func (w *watch) arm() {
	now := time.Now()
	if w.since.IsZero() {
		w.since = now
	}
	w.timer.Reset(min(quietFor, max(0, w.since.Add(mostFor).Sub(now))))
}

func (w *watch) scan(t *tree, e *emitter) {
	w.since, w.scanned = time.Time{}, time.Now()
	w.follow()
	// A directory that cannot be read is among the tree's problems.
	if err := t.scan(w.dirty); err != nil {
		w.source.log.Debug("Cannot read manifests", "err", err)
	}
	w.dirty = map[string]bool{}
	w.followLinks(t)
	e.emit(t.delta(), t.problems())
	if len(t.incomplete) > 0 {
		w.dirty = t.incomplete
		w.arm()
	} else if wait, ok := t.due(); ok {
		w.timer.Reset(wait)
	}
}
