// Package manifest reads Kubernetes objects from a directory of YAML and JSON
// files, and watches it, for nodes that have no API server.
//
//	directory ──scan──> files ──decode──> claims ──elect──> model.Delta
//
// The directory is flat, as kubelet's static one is: *.yaml, *.yml and *.json,
// hidden files and sub-directories left out. A YAML file may hold several
// documents, and each may be a List.
//
// What a person gets wrong never takes down what serves. A document that does
// not decode leaves the last good state of its object in place; one of which not
// even the kind and name can be read holds every object that the file had. An
// empty file is taken for one that is being written, and a directory that
// disappears for one that will be back. A renamed file is the same file, and one
// that is away for a moment is being saved. Of two files that hold the same object
// the one that serves it goes on doing so, if only with its last good state, until
// it is readable without the object or gone; at the start it is the first by name.
// All of it is reported.
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

// maxFileSize in bytes bounds what one file may ask of memory.
const maxFileSize = 16 << 20

// Config says what to read.
type Config struct {
	// Dir is the directory.
	Dir string
	// Logger gets debug lines about what is passed over; nil discards them.
	// Problems go to the caller of Run, not here.
	Logger *slog.Logger
	// Poll is how often files are compared with what was read even if no change
	// was notified: a symbolic link may lead to another, and network file systems
	// do not notify. 0 is 10 s.
	Poll time.Duration
}

// Validate reports a Config that cannot work.
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
	// check is how often the directory itself is looked for.
	check time.Duration
}

// New returns a Source. A directory that is not there is an error.
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

// Load reads the directory once. The Delta is Full; what is wrong with single
// files and documents is in the problems, sorted by file and document.
func Load(dir string) (model.Delta, []model.Problem, error) {
	t := newTree(dir, slog.New(slog.DiscardHandler))
	if err := t.scan(nil); err != nil {
		return model.Delta{}, nil, describeDir(dir, err)
	}
	d := t.delta()
	d.Full = true
	return d, t.problems(), nil
}

// Run reads the directory and calls fn with all of it, then with each change
// until ctx ends, when it returns nil. The first Delta is Full. Problems are complete
// whenever they changed: an empty list means that all are resolved, and nil that none
// changed. fn is never called twice at a time.
//
// It returns an error only if the directory cannot be read at the start.
func (s *Source) Run(ctx context.Context, fn func(model.Delta, []model.Problem)) error {
	w := newWatch(s)
	defer w.close()
	w.follow() // before the first look, so that no change falls in between
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

// emitter passes on what changed, and only that.
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

// describeDir turns a failure to read the directory into the line a person needs.
func describeDir(dir string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read manifests: %w; create the directory, or name another with --manifests", err)
	case errors.Is(err, errNotDir):
		return fmt.Errorf("read manifests: %s %w; name the directory that it is in", dir, errNotDir)
	}
	return fmt.Errorf("read manifests: %w", err)
}
