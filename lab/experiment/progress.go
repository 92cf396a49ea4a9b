package experiment

import (
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Progress tells a person what is being done: on a terminal in one line that
// is written over, elsewhere in a line for each step. The zero value is silent.
type Progress struct {
	mu       sync.Mutex
	w        io.Writer
	terminal bool
	open     bool // the line on the terminal is not ended yet
	step     string
}

// NewProgress writes to w.
func NewProgress(w io.Writer) *Progress {
	return &Progress{w: w, terminal: IsTerminal(w)}
}

// Step begins a new step.
func (p *Progress) Step(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.step = fmt.Sprintf(format, args...)
	if p.terminal {
		p.overwrite(p.step)
	} else if p.w != nil {
		fmt.Fprintln(p.w, p.step)
	}
}

// Part says how far the step is. It shows on a terminal only.
func (p *Progress) Part(done, total int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.terminal {
		p.overwrite(fmt.Sprintf("%s (%d of %d)", p.step, done, total))
	}
}

// Done takes the line away, so that the result begins on a clean one.
func (p *Progress) Done() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.open = false
	}
}

func (p *Progress) overwrite(line string) {
	fmt.Fprintf(p.w, "\r\x1b[K%s", line)
	p.open = true
}

// IsTerminal tells whether a person may be looking at w.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
