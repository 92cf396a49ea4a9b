package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
)

// fix is a change that is always safe: it raises a limit, or deletes stale entries.
type fix struct {
	does string
	do   func(context.Context) (string, error) // the note names the action taken instead, if any
}

// Fixed is the result of a fix.
type Fixed struct {
	ID    string `json:"id"` // of the Finding
	Does  string `json:"does"`
	Done  bool   `json:"done"`
	Note  string `json:"note,omitempty"`
	Error string `json:"error,omitempty"`
}

// ApplyFixes applies the fixes of the findings, each distinct fix once. It continues
// after a fix that fails.
func ApplyFixes(ctx context.Context, findings []Finding) []Fixed {
	done := []Fixed{}
	for _, f := range findings {
		for _, x := range f.fixes {
			if slices.ContainsFunc(done, func(d Fixed) bool { return d.Does == x.does }) {
				continue
			}
			result := Fixed{ID: f.ID, Does: x.does}
			note, err := x.do(ctx)
			result.Note, result.Done = note, err == nil
			if err != nil {
				result.Error = err.Error()
			}
			done = append(done, result)
		}
	}
	return done
}

// raise returns a fix that raises a sysctl of a namespace. A value that is large enough
// by then stays.
func raise(n conntrack.Namespace, name string, to int) fix {
	return fix{
		does: fmt.Sprintf("raise %s to %d in %s", name, to, n),
		do: func(context.Context) (note string, err error) {
			err = n.Enter(func() error {
				note, err = raiseHere(name, to)
				return err
			})
			return note, err
		},
	}
}

// raiseShared is raise for a sysctl that all namespaces share. It writes the sysctl in
// the namespace of doctor, which must be the machine's own.
func raiseShared(name string, to int) fix {
	return fix{
		does: fmt.Sprintf("raise %s to %d, for all namespaces", name, to),
		do:   func(context.Context) (string, error) { return raiseHere(name, to) },
	}
}

func raiseHere(name string, to int) (note string, err error) {
	s, err := kernel.ReadSysctl(name)
	if err != nil {
		return "", err
	}
	if now, err := strconv.Atoi(s); err == nil && now >= to {
		return fmt.Sprintf("left alone: it is %d", now), nil
	}
	return "", hint(kernel.WriteSysctl(name, strconv.Itoa(to)))
}

// hint adds the cause and the remedy to an error of writing a sysctl.
func hint(err error) error {
	switch {
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: /proc/sys is read only, as in an unprivileged container: run the command on the node", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: this needs root in the machine's own network namespace: run the command on the node", err)
	}
	return err
}
