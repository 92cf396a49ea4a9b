package experiment

import (
	"io"

	"spillway.dev/spillway/internal/cli/progress"
)

// Progress is how experiments report their steps.
type Progress = progress.Progress

// NewProgress writes to w.
func NewProgress(w io.Writer) *Progress { return progress.New(w) }
