package cli

import (
	"fmt"
	"slices"

	"github.com/spf13/pflag"
)

// UsageError is an error in the command line. The program exits with ExitUsage.
type UsageError struct{ msg string }

func (e *UsageError) Error() string { return e.msg }

// UsageErrorf returns a UsageError.
func UsageErrorf(format string, args ...any) error {
	return &UsageError{msg: fmt.Sprintf(format, args...)}
}

// NotEmpty returns a UsageError if one of the flags was given without a value. A script
// that leaves a filter empty by mistake would remove the filter.
func NotEmpty(flags *pflag.FlagSet, names ...string) error {
	for _, name := range names {
		f := flags.Lookup(name)
		if !f.Changed {
			continue
		}
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		if len(values) == 0 || slices.Contains(values, "") {
			return UsageErrorf("--%s: a value is empty", name)
		}
	}
	return nil
}
