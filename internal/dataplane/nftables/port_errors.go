package nftables

import (
	"context"
	"maps"
	"slices"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

// restore makes the table hold a state, without the ports that the kernel refuses: a batch is carried
// out as a whole or not at all, and one port must not keep the changes of all others from the kernel.
func (b *Backend) restore(ctx context.Context, s intent.State, failed map[intent.PortID]error) error {
	err := b.restoreAll(ctx, s, failed)
	if err != nil && ctx.Err() == nil {
		bad := b.refused(ctx, s)
		if len(bad) == 0 || len(bad) == len(s.Ports) {
			return err // it is not about single ports
		}
		maps.Copy(failed, bad)
		s.Ports = slices.DeleteFunc(slices.Clone(s.Ports), func(p *intent.ServicePort) bool { return bad[p.ID] != nil })
		err = b.restoreAll(ctx, s, failed)
	}
	if err != nil {
		return err
	}
	return dataplane.PortErrorsOf(failed)
}

// refused returns the ports that the kernel does not accept, and why. It halves the list and lets the
// kernel check each half, in a table that is not made.
func (b *Backend) refused(ctx context.Context, s intent.State) map[intent.PortID]error {
	bad := map[intent.PortID]error{}
	var search func([]*intent.ServicePort)
	search = func(ports []*intent.ServicePort) {
		if len(ports) == 0 || ctx.Err() != nil {
			return
		}
		err := b.check(ctx, intent.State{Ports: ports, Node: s.Node})
		switch {
		case err == nil:
		case len(ports) == 1:
			bad[ports[0].ID] = err
		default:
			search(ports[:len(ports)/2])
			search(ports[len(ports)/2:])
		}
	}
	search(s.Ports)
	return bad
}

// check returns the error of a table with this state.
func (b *Backend) check(ctx context.Context, s intent.State) error {
	of := b.nftTable
	of.Name += "-probe"
	ch, _ := wholeChange(b.traits, s)
	tx := ch.plan(of).tx
	tx.AddTable()
	return b.conn.Check(ctx, tx)
}
