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

// fix is a change that harms nobody: it only raises what an operator has set.
type fix struct {
	does string
	do   func(context.Context) (string, error) // says what was done instead, if anything
}

// Fixed is what became of a fix.
type Fixed struct {
	ID    string `json:"id"` // of the Finding
	Does  string `json:"does"`
	Done  bool   `json:"done"`
	Note  string `json:"note,omitempty"`
	Error string `json:"error,omitempty"`
}

// Mend applies the fixes of the findings, the same one once. It goes on after
// one that fails.
func Mend(ctx context.Context, findings []Finding) []Fixed {
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

// raise sets a sysctl of a namespace to a larger number. What has become large
// enough meanwhile stays.
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

// raiseShared is raise for a sysctl that all namespaces share: it is written
// where doctor runs, which must be the machine's own namespace.
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

// hint says what is behind an error of writing a sysctl.
func hint(err error) error {
	switch {
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: /proc/sys is read only here, as in a container that is not privileged: run the command on the node", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: it takes root, in the machine's own network namespace: run the command on the node", err)
	}
	return err
}
