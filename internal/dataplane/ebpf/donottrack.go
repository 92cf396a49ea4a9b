package ebpf

import (
	"spillway.dev/spillway/internal/dataplane"
	untracked "spillway.dev/spillway/internal/dataplane/ebpf/donottrack"
	"spillway.dev/spillway/internal/decisions/donottrack"
)

var _ dataplane.Bypass = (*Backend)(nil)

// Serves reports whether programs of an earlier run served Services at the start of
// this one.
func (b *Backend) Serves() bool { return b.policies.Served() }

// Revoke deletes the entries that this state does not allow to bypass netfilter.
func (b *Backend) Revoke(s donottrack.State, c *donottrack.Changes) error {
	return b.policies.Revoke(s, c)
}

// Grant adds the entries that this state allows to bypass netfilter.
func (b *Backend) Grant(s donottrack.State, c *donottrack.Changes) error {
	return b.policies.Grant(s, c)
}

// openPolicies opens the maps of policies.
func (b *Backend) openPolicies() (err error) {
	b.policies, err = untracked.Open(b.objects, b.cfg.Log, b.node.SetUntracking)
	return err
}
