package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"spillway.dev/spillway/internal/dataplane"
)

// writeChanged is a partial sync: one restore for each family, with the chains that
// changed. If it fails, a full sync follows.
func (b *Backend) writeChanged(ctx context.Context, diffs [][]difference) error {
	written := map[string]int{}
	for i, f := range b.families {
		diffs[i] = slices.DeleteFunc(diffs[i], func(d difference) bool { return d.empty() })
		if len(diffs[i]) == 0 {
			continue
		}
		for n := range diffs[i] {
			d := &diffs[i][n]
			written[d.table] += d.rules()
			if d.table == tableFilter {
				continue
			}
			// Chains are useless if another program has flushed the jumps to them. The
			// restore checks the jumps.
			for _, j := range f.jumpsOf(d.table) {
				d.check = append(d.check, "-C "+j.from+" "+j.rule)
			}
		}
		f.seen = fingerprint{}
		if err := f.programs.write(ctx, diffs[i]...); err != nil {
			return b.partialFailed(ctx, err)
		}
	}
	b.metrics.synced(b.families, written)
	if len(written) == 0 || !b.dueToVerify() {
		return nil
	}
	if _, err := b.repair(ctx); err != nil {
		return fmt.Errorf("verify a partial sync: %w", err)
	}
	return nil
}

// partialFailed writes everything at once, unless that has to wait for the same lock.
func (b *Backend) partialFailed(ctx context.Context, err error) error {
	b.known = false
	if ctx.Err() != nil {
		return err
	}
	b.metrics.failures.Inc()
	b.metrics.partialFailures.Inc()
	if errors.Is(err, errLocked) {
		return err
	}
	b.cfg.Log.Warn("partial sync failed, perhaps because another program changed the rules; a full sync follows", "err", err)
	return b.writeAll(ctx)
}

// writeAll is a full sync: it reads every table, and writes the differences.
func (b *Backend) writeAll(ctx context.Context) error {
	if _, err := b.repair(ctx); err != nil || b.earlier == nil {
		return err
	}
	if err := b.cfg.removeOwn(ctx, *b.earlier); err != nil {
		return fmt.Errorf("remove rules of an earlier run with the other variant: %w", err)
	}
	b.cfg.Log.Info("rules of an earlier run with the other variant are removed")
	b.earlier = nil
	return nil
}

// repair writes the desired state to the kernel and returns the chains and jumps that
// differed. A family that fails does not delay the other.
func (b *Backend) repair(ctx context.Context) (all dataplane.Repair, err error) {
	before, start := b.known, time.Now()
	written := map[string]int{}
	for _, f := range b.families {
		r, failed := b.repairFamily(ctx, f, written)
		all.Add(r)
		switch {
		case err == nil:
			err = failed
		case failed != nil:
			err = fmt.Errorf("%w; %w", err, failed)
		}
	}
	if err != nil {
		b.known = false
		return all, err
	}
	b.known = true
	b.verified = time.Now()
	b.took = b.verified.Sub(start)
	if before {
		b.metrics.differences.Add(float64(all.Missing + all.Foreign))
		b.repaired.Add(all)
	}
	b.metrics.synced(b.families, written)
	return all, nil
}

// repairFamily repairs one family, and counts the rules that it writes.
func (b *Backend) repairFamily(ctx context.Context, f *family, written map[string]int) (r dataplane.Repair, err error) {
	if err := f.findRaw(ctx); err != nil {
		return r, err
	}
	now := newFingerprint(b.variant, f.ruleset.family, f.tables())
	if b.known && f.seen.same(now) {
		return r, nil
	}
	f.seen = fingerprint{}
	diffs, err := f.compare(ctx)
	if err != nil {
		return r, err
	}
	for _, d := range diffs {
		written[d.table] += d.rules()
	}
	f.raw = len(f.helped) > 0 // this sync deletes unwanted chains of tables raw and mangle
	if r = repairOf(f.ruleset.family, diffs); !r.Any() {
		f.seen = now // taken before the comparison: the next audit finds later changes
		return r, nil
	}
	err = b.writeDifferences(ctx, f, diffs)
	f.raw = f.raw || err != nil
	if err != nil && ctx.Err() == nil {
		b.metrics.failures.Inc()
	}
	return r, err
}

// compare reads the tables of a family and returns the differences to write.
func (f *family) compare(ctx context.Context) ([]difference, error) {
	var diffs []difference
	for _, table := range f.tables() {
		have, err := f.programs.readTable(ctx, table, nil)
		if err != nil {
			return nil, err
		}
		diffs = append(diffs, f.against(have))
	}
	return diffs, nil
}

// writeDifferences writes differences, in one call if possible. A chain that another
// program's rule jumps to cannot be deleted, and must not block the rest: it stays, empty.
func (b *Backend) writeDifferences(ctx context.Context, f *family, diffs []difference) error {
	err := f.programs.write(ctx, diffs...)
	gone := 0
	for i := range diffs {
		gone += len(diffs[i].gone)
	}
	if err == nil || gone == 0 || ctx.Err() != nil || errors.Is(err, errLocked) {
		return err
	}
	rest := make([]difference, len(diffs))
	for i, d := range diffs {
		rest[i] = d
		rest[i].gone = nil
		rest[i].fill = slices.Concat(d.fill, emptied(d.gone))
	}
	if err := f.programs.write(ctx, rest...); err != nil {
		return err
	}
	for _, d := range diffs {
		for name, err := range f.programs.removeEmpty(ctx, d.table, d.gone) {
			b.cfg.Log.Warn("a chain that is of no use any more is left empty: another program's rule leads to it",
				"table", d.table, "chain", name, "err", err)
		}
	}
	return ctx.Err()
}

// emptied returns the named chains, without rules.
func emptied(names []string) []chain {
	chains := make([]chain, len(names))
	for i, name := range names {
		chains[i].name = name
	}
	return chains
}

// removeEmpty removes chains without jumps from the agent's rules. It returns the chains
// that another program's rule still jumps to, each with the reason.
func (p *programs) removeEmpty(ctx context.Context, table string, names []string) map[string]error {
	if len(names) == 0 {
		return nil
	}
	err := p.write(ctx, difference{table: table, gone: names})
	if err == nil {
		return nil
	}
	left := map[string]error{}
	if len(names) == 1 || ctx.Err() != nil || errors.Is(err, errLocked) {
		for _, name := range names {
			left[name] = err
		}
		return left
	}
	for _, half := range [][]string{names[:len(names)/2], names[len(names)/2:]} {
		maps.Copy(left, p.removeEmpty(ctx, table, half))
	}
	return left
}

// sampledShare is the maximum part of the time that sampled verification takes.
const sampledShare = 100

func (b *Backend) dueToVerify() bool {
	switch b.cfg.VerifyPartialSync {
	case VerifyAlways:
		return true
	case VerifySampled:
		return time.Since(b.verified) > sampledShare*b.took
	}
	return false
}
