// Package progress shows how far a command is.
package progress

import (
	"fmt"
	"io"
	"sync"

	"spillway.dev/spillway/internal/page"
)

// Progress shows the current step: on a terminal in one line that is overwritten, else in
// a line for each step. A nil Progress is silent.
type Progress struct {
	mu       sync.Mutex
	w        io.Writer
	terminal bool
	open     bool // the line on the terminal is not ended yet
	step     string
	part     string
	bar      func() string
}

// New writes to w.
func New(w io.Writer) *Progress {
	return &Progress{w: w, terminal: page.IsTerminal(w)}
}

// Bar sets the beginning of each line, such as a bar with the remaining time; nil removes
// it. Progress calls it for each line.
func (p *Progress) Bar(bar func() string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bar = bar
}

// Step starts a new step.
func (p *Progress) Step(format string, args ...any) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.step, p.part = fmt.Sprintf(format, args...), ""
	if p.terminal {
		p.overwrite()
	} else {
		fmt.Fprintln(p.w, p.prefix()+p.step)
	}
}

// Part shows the progress of the step, on a terminal only.
func (p *Progress) Part(done, total int) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.part = fmt.Sprintf(" (%d of %d)", done, total)
	if p.terminal {
		p.overwrite()
	}
}

// Refresh writes the line on a terminal again, so that its bar moves.
func (p *Progress) Refresh() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		p.overwrite()
	}
}

// Done removes the line, so that the result starts on an empty one.
func (p *Progress) Done() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.open = false
	}
}

func (p *Progress) prefix() string {
	if p.bar == nil {
		return ""
	}
	return p.bar()
}

func (p *Progress) overwrite() {
	line := []rune(p.prefix() + p.step + p.part)
	// A line that wraps could not be written over.
	if width := page.Width(p.w); width > 0 && len(line) >= width {
		line = append(line[:max(width-2, 0)], '…')
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s", string(line))
	p.open = true
}
