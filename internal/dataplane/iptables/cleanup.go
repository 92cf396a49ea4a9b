package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Cleanup removes every chain of the agent from both variants, with the jumps into them.
// Missing chains are no error. A variant whose programs are not installed is an error
// only if the kernel holds chains of the agent in it.
func Cleanup(ctx context.Context, cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("configure dataplane iptables: %w", err)
	}
	var errs []error
	for _, v := range []Variant{Legacy, NFT} {
		f := readVariant(ctx, &cfg, v)
		switch {
		case f.missing != nil:
			errs = append(errs, checkLeft(v, f.missing))
		case f.own:
			errs = append(errs, cfg.removeOwn(ctx, f))
		}
	}
	return errors.Join(errs...)
}

// checkLeft returns an error if the kernel holds chains of the agent in a variant whose
// programs are unusable. missing is the reason.
func checkLeft(v Variant, missing error) error {
	left, err := kernelHasOwn(v)
	if err != nil {
		return fmt.Errorf("look for rules of iptables-%s: %w", v, err)
	}
	if left {
		return fmt.Errorf("remove rules of iptables-%s: the kernel holds chains %s*, and they cannot be removed: %w, or run --cleanup where "+
			"it is installed",
			v, chainPrefix, missing)
	}
	return nil
}

// removeOwn removes every chain of the agent from one variant.
func (c *Config) removeOwn(ctx context.Context, f found) error {
	if c.BeforeRemoval != nil {
		if err := c.BeforeRemoval(ctx); err != nil {
			return err
		}
	}
	var errs []error
	for _, p := range []*programs{f.v4, f.v6} {
		dumps, err := p.read(ctx, "", nil)
		if err != nil {
			return err
		}
		for _, d := range dumps {
			errs = append(errs, p.removeAll(ctx, d))
		}
	}
	return errors.Join(errs...)
}

func (p *programs) removeAll(ctx context.Context, d *dump) error {
	all := difference{table: d.table, gone: slices.Sorted(maps.Keys(d.chains)), edits: d.editJumps(nil)}
	err := p.write(ctx, all)
	if err == nil || ctx.Err() != nil || errors.Is(err, errLocked) {
		return err
	}
	// Another program's rule jumps to one of the chains. The others must go.
	if err := p.write(ctx, difference{table: d.table, edits: all.edits, fill: emptied(all.gone)}); err != nil {
		return err
	}
	var errs []error
	left := p.removeEmpty(ctx, d.table, all.gone)
	for _, name := range slices.Sorted(maps.Keys(left)) {
		errs = append(errs, fmt.Errorf("remove chain %s of table %s: remove the rule that leads to it (%s | grep -- '-j %s'): %w",
			name, d.table, p.save, name, left[name]))
	}
	return errors.Join(errs...)
}
