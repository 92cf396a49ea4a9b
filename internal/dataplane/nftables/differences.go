package nftables

import (
	"context"
	"errors"
	"fmt"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

var _ dataplane.Comparer = (*Backend)(nil)

// Differences implements dataplane.Comparer. It reads the rules of the table, and each element
// of the port by its key.
func (b *Backend) Differences(ctx context.Context, id intent.PortID, limit int) ([]string, error) {
	if err := b.turn.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("wait for a write: %w", err)
	}
	defer b.turn.Release(1)
	if b.table == nil {
		return nil, errors.New("the last write failed, so it is not known what the kernel should hold")
	}
	p := b.table.ports[id]
	if p == nil {
		return nil, nil
	}
	shape, err := b.conn.Read(ctx, b.nftTable, false)
	if err != nil {
		return nil, err
	}
	var found []string
	if !b.table.matches(shape) {
		found = append(found, fmt.Sprintf("table %s: its chains, rules or sets are not as they were written", b.nftTable))
	}
	r, err := renderPort(b.table.layout, p)
	if err != nil {
		return nil, err
	}
	for i := range r.elems {
		if len(found) >= limit {
			break
		}
		what, err := b.difference(ctx, &r.elems[i])
		if err != nil {
			return nil, err
		}
		if what != "" {
			found = append(found, what)
		}
	}
	return found, nil
}

// difference describes how the kernel's element differs; "" if it does not.
func (b *Backend) difference(ctx context.Context, e *elem) (string, error) {
	got, err := b.conn.Element(ctx, b.nftTable, e.set.Name, e.key)
	if err != nil {
		return "", fmt.Errorf("read an element of set %s: %w", e.set.Name, err)
	}
	at := fmt.Sprintf("%s: %s", nft.Text(e.set.Key, e.key), e.set.Name)
	switch {
	case got == nil:
		return at + " has no element", nil
	case *got == e.Value:
		return "", nil
	case got.Data != e.Data:
		return fmt.Sprintf("%s has %s, not %s", at, nft.Text(e.set.Data, got.Data), nft.Text(e.set.Data, e.Data)), nil
	}
	return at + " has another element", nil
}
