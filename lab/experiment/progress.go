package experiment

import "spillway.dev/spillway/internal/cli/progress"

// Progress is how experiments report their steps.
type Progress = progress.Progress
