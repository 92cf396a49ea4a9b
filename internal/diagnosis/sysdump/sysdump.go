// Package sysdump writes an archive with the state of a node and of a cluster, for a bug
// report. Collectors read the parts. Each has a timeout and a size limit. The archive's
// index records a failure, which ends nothing. Everything passes a Redactor before it is
// written.
package sysdump

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// Collector reads one file of the archive.
type Collector struct {
	File    string // path in the archive
	About   string // what the file has, for the index
	Timeout time.Duration
	// Collect writes the content. It ends early if a write fails, which is the size limit.
	Collect func(ctx context.Context, w io.Writer) error
}

// Config configures an archive.
type Config struct {
	Name       string // of the directory in the archive
	Version    string // of the program
	Time       time.Time
	Collectors []Collector
	Redactor   *Redactor
	// FileLimit and Limit bound the bytes of one file and of all files, before they are
	// compressed; 0 is the default.
	FileLimit, Limit int
	// Part reports progress; nil is silent.
	Part func(done, total int)
}

// Defaults of Config and Collector.
const (
	DefaultFileLimit = 2 << 20
	DefaultLimit     = 64 << 20
	DefaultTimeout   = 20 * time.Second
)

// parallel is the number of collectors that run at once.
const parallel = 4

// indexFile is the file in the archive that lists the others.
const indexFile = "index.json"

// Index lists the files of an archive.
type Index struct {
	Version string    `json:"version"`
	Time    time.Time `json:"time"`
	Files   []Entry   `json:"files"`
}

// Entry is a file of the archive, or the reason why it is missing or incomplete.
type Entry struct {
	File  string `json:"file"`
	About string `json:"about"`
	Bytes int    `json:"bytes"`
	// Cut reports that the file ends at a size limit.
	Cut   bool   `json:"cut,omitempty"`
	Error string `json:"error,omitempty"`
}

// Failed returns the entries with an error.
func (i *Index) Failed() (list []Entry) {
	for _, e := range i.Files {
		if e.Error != "" {
			list = append(list, e)
		}
	}
	return list
}

// Write collects everything and writes the archive. An error is one of writing, or the end
// of ctx.
func Write(ctx context.Context, w io.Writer, c Config) (*Index, error) {
	c.FileLimit, c.Limit = cmp.Or(c.FileLimit, DefaultFileLimit), cmp.Or(c.Limit, DefaultLimit)
	if c.Redactor == nil {
		c.Redactor = NewRedactor()
	}
	contents, index := c.collect(ctx)
	if ctx.Err() != nil {
		return nil, fmt.Errorf("collect: %w", context.Cause(ctx))
	}
	text, err := json.MarshalIndent(index, "", "  ")
	if err != nil {
		return nil, err
	}
	packed := gzip.NewWriter(w)
	archive := tar.NewWriter(packed)
	write := func(name string, content []byte) error {
		header := &tar.Header{Name: c.Name + "/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: c.Time, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		_, err := archive.Write(content)
		return err
	}
	err = write(indexFile, append(text, '\n'))
	for i, content := range contents {
		if err == nil && len(content) > 0 {
			err = write(index.Files[i].File, content)
		}
	}
	if err := errors.Join(err, archive.Close(), packed.Close()); err != nil {
		return nil, fmt.Errorf("write archive: %w", err)
	}
	return index, nil
}

// collect runs the collectors. Contents are in their order, nil for one without.
func (c *Config) collect(ctx context.Context) ([][]byte, *Index) {
	contents := make([][]byte, len(c.Collectors))
	index := &Index{Version: c.Version, Time: c.Time.UTC(), Files: make([]Entry, len(c.Collectors))}
	var mu sync.Mutex
	done, left := 0, c.Limit
	var group errgroup.Group
	group.SetLimit(parallel)
	for i, one := range c.Collectors {
		group.Go(func() error {
			mu.Lock()
			limit := min(c.FileLimit, left)
			left -= limit // reserved, so that all together keep the limit
			mu.Unlock()
			content, entry := c.run(ctx, one, limit)
			mu.Lock()
			defer mu.Unlock()
			left += limit - len(content)
			contents[i], index.Files[i] = content, entry
			done++
			if c.Part != nil {
				c.Part(done, len(c.Collectors))
			}
			return nil
		})
	}
	_ = group.Wait() // failures are in the index
	return contents, index
}

// run runs one collector. One that does not end with its timeout is left alone.
func (c *Config) run(ctx context.Context, one Collector, limit int) ([]byte, Entry) {
	timeout := cmp.Or(one.Timeout, DefaultTimeout)
	ctx, stop := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not done after %v", timeout))
	defer stop()
	buffer := &limited{limit: limit}
	ended := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				ended <- fmt.Errorf("collector failed: %v", p)
			}
		}()
		ended <- one.Collect(ctx, buffer)
	}()
	var err error
	select {
	case err = <-ended:
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	content, cut := buffer.close()
	if cut && errors.Is(err, errLimit) {
		err = nil
	}
	text := c.Redactor.Text(content)
	if len(text) > limit {
		text, cut = text[:limit], true
	}
	entry := Entry{File: one.File, About: one.About, Bytes: len(text), Cut: cut}
	if err != nil {
		entry.Error = c.Redactor.Text(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return []byte(text), entry
}

var errLimit = errors.New("size limit reached")

// limited is a buffer that ends at a limit, and that a collector may still write to after it
// was closed.
type limited struct {
	mu     sync.Mutex
	buffer bytes.Buffer
	limit  int
	cut    bool
	closed bool
}

// Write keeps what fits.
func (l *limited) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return 0, errLimit
	}
	room := l.limit - l.buffer.Len()
	if len(p) > room {
		l.cut = true
		l.buffer.Write(p[:room])
		return room, errLimit
	}
	return l.buffer.Write(p)
}

// close returns the content. A line that was cut off is left out: a part of a secret might
// not be recognized.
func (l *limited) close() (text string, cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	text = l.buffer.String()
	if l.cut {
		text = text[:strings.LastIndexByte(text, '\n')+1]
	}
	return text, l.cut
}
