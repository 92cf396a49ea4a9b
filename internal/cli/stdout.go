package cli

import (
	"io"

	"github.com/charmbracelet/x/term"
)

// stdout is a program's standard output. It keeps the first error of a write, so that a
// full disk fails every command, also those that ignore the error.
type stdout struct {
	io.Writer
	err error
}

func (s *stdout) Write(text []byte) (int, error) {
	n, err := s.Writer.Write(text)
	if s.err == nil {
		s.err = err
	}
	return n, err
}

// writer returns a writer for commands. It is a file if the output is one: pages look for
// the width of the terminal.
func (s *stdout) writer() io.Writer {
	if f, ok := s.Writer.(term.File); ok {
		return &stdoutFile{File: f, stdout: s}
	}
	return s
}

type stdoutFile struct {
	term.File
	stdout *stdout
}

func (f *stdoutFile) Write(text []byte) (int, error) { return f.stdout.Write(text) }
