package cli

import (
	"slices"
	"strings"

	"spillway.dev/spillway/internal/node/conntrack"
)

// Namespaces finds the network namespaces that --netns names, the caller's own first. An
// unknown name is a UsageError.
func Namespaces(names []string) ([]conntrack.Namespace, error) {
	list, _ := conntrack.Namespaces() // a namespace that cannot be read is reported as missing below
	var out []conntrack.Namespace
	var missing []string
	for _, want := range names {
		i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(want) })
		switch {
		case i < 0:
			missing = append(missing, want)
		case !slices.ContainsFunc(out, func(n conntrack.Namespace) bool { return n.Inode == list[i].Inode }):
			out = append(out, list[i])
		}
	}
	if len(missing) > 0 {
		return nil, UsageErrorf("--netns %s: no such network namespace; 'spillway top --once' shows those in use", strings.Join(missing, ","))
	}
	slices.SortStableFunc(out, func(a, b conntrack.Namespace) int {
		switch {
		case a.Own:
			return -1
		case b.Own:
			return 1
		}
		return 0
	})
	return out, nil
}
