// Package manifest reads Kubernetes objects from a directory of YAML and JSON
// files, and watches it, for nodes that have no API server.
//
//	directory ──scan──> files ──decode──> definitions ──elect──> model.Delta
//
// The directory is flat, as kubelet's static one is: *.yaml, *.yml and *.json. Hidden
// files and subdirectories are ignored. A YAML file may hold several documents, and each
// may be a List.
//
// An operator's mistake never removes an object that serves. A document that does not
// decode leaves the last good state of its object in place. If its kind and name are
// unreadable too, all objects of the file stay. An empty file counts as being written,
// and a missing directory as temporarily missing. A renamed file is the same file. A file
// that is missing for a moment is being saved. If two files define the same object, the
// serving file keeps serving it, even with its last good state. The other takes over when
// the first is readable without the object, or deleted. At the start the first file by
// name serves. All of this is reported.
package manifest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// maxFileSize limits the memory for one file, in bytes.
const maxFileSize = 16 << 20

// Config configures a Source.
type Config struct {
	// Dir is the directory.
	Dir string
	// Logger gets debug lines about ignored objects; nil discards them. Problems go to
	// the caller of Run, not here.
	Logger *slog.Logger
	// Poll is the period of comparing files with their last read state, even without a
	// notification. A symbolic link may lead to another file, and network file systems do
	// not notify. 0 is 10 s.
	Poll time.Duration
}

// Validate reports an invalid Config.
func (c Config) Validate() error {
	if c.Dir == "" {
		return errors.New("manifest directory is not set; name one with --manifests")
	}
	if c.Poll < 0 {
		return fmt.Errorf("manifest poll interval is %v; use 0 for the default or a positive one", c.Poll)
	}
	return nil
}

// Source watches one manifest directory.
type Source struct {
	config Config
	log    *slog.Logger
	// check is the period of checks for another directory at the path.
	check time.Duration
}

// New returns a Source. A missing directory is an error.
func New(config Config) (*Source, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	if config.Poll == 0 {
		config.Poll = 10 * time.Second
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	if _, err := statDir(config.Dir); err != nil {
		return nil, describeDir(config.Dir, err)
	}
	return &Source{config: config, log: config.Logger, check: time.Second}, nil
}

// Load reads the directory once. The Delta is Full. Errors in files and documents are in
// the problems, sorted by file and document.
func Load(dir string) (model.Delta, []model.Problem, error) {
	t := newTree(dir, slog.New(slog.DiscardHandler))
	if err := t.scan(nil); err != nil {
		return model.Delta{}, nil, describeDir(dir, err)
	}
	d := t.delta()
	d.Full = true
	return d, t.problems(), nil
}

// Run reads the directory and calls fn with all of it, then with each change until ctx
// ends, when it returns nil. The first Delta is Full. Problems are complete whenever they
// changed: an empty list means that all are resolved, and nil that none changed. Calls of
// fn never overlap.
//
// It returns an error only if the directory cannot be read at the start.
func (s *Source) Run(ctx context.Context, fn func(model.Delta, []model.Problem)) error {
	w := newWatch(s)
	defer w.close()
	w.follow() // before the first scan, so that no change is missed
	t := newTree(s.config.Dir, s.log)
	if err := t.scan(nil); err != nil {
		return describeDir(s.config.Dir, err)
	}
	d := t.delta()
	d.Full = true
	e := emitter{fn: fn}
	e.emit(d, t.problems())
	w.run(ctx, t, &e)
	return nil
}

// emitter delivers changes only.
type emitter struct {
	fn       func(model.Delta, []model.Problem)
	problems []model.Problem
	started  bool
}

func (e *emitter) emit(d model.Delta, problems []model.Problem) {
	if problems == nil {
		problems = []model.Problem{}
	}
	if e.started && slices.Equal(e.problems, problems) {
		problems = nil
	} else {
		e.problems = problems
	}
	e.started = true
	if !d.Empty() || problems != nil {
		e.fn(d, problems)
	}
}

// describeDir converts an error of reading the directory into a readable line.
func describeDir(dir string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read manifests: %w; create the directory, or name another with --manifests", err)
	case errors.Is(err, errNotDir):
		return fmt.Errorf("read manifests: %s %w; name the directory that it is in", dir, errNotDir)
	}
	return fmt.Errorf("read manifests: %w", err)
}
