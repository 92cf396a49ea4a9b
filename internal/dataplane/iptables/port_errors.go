package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"spillway.dev/spillway/internal/decisions/intent"
)

// withoutRefused writes everything again after an error, if that is about single ports, and without
// them. It adds them to failed.
func (b *Backend) withoutRefused(ctx context.Context, err error, failed map[intent.PortID]error) error {
	if err == nil {
		return nil
	}
	bad := b.leaveOutRefused(ctx, err)
	if bad == nil {
		return err
	}
	maps.Copy(failed, bad)
	return b.writeAll(ctx)
}

// leaveOutRefused removes from the desired state the ports whose rules iptables-restore refuses, and
// returns them: a table changes as a whole or not at all, and one port must not keep the changes of all
// others from the kernel. It returns nil if the error of a write is not about single ports.
func (b *Backend) leaveOutRefused(ctx context.Context, failed error) map[intent.PortID]error {
	if ctx.Err() != nil || errors.Is(failed, errLocked) {
		return nil
	}
	bad, all := map[intent.PortID]error{}, 0
	for _, f := range b.families {
		all += len(f.ports)
		f.refused(ctx, slices.Collect(maps.Values(f.ports)), bad)
	}
	if len(bad) == 0 || len(bad) == all {
		return nil
	}
	for _, f := range b.families {
		f.raw = f.raw || len(f.helped) > 0
		f.apply(nil, slices.Collect(maps.Keys(bad)))
		f.recomputeHelpers()
	}
	b.known = false
	return bad
}

// refused adds to bad the ports whose rules are refused, and why. It halves the list, and changes
// nothing.
func (f *family) refused(ctx context.Context, ports []*intent.ServicePort, bad map[intent.PortID]error) {
	if len(ports) == 0 || ctx.Err() != nil {
		return
	}
	err := f.check(ctx, ports)
	switch {
	case err == nil:
	case len(ports) == 1:
		bad[ports[0].ID] = err
	default:
		f.refused(ctx, ports[:len(ports)/2], bad)
		f.refused(ctx, ports[len(ports)/2:], bad)
	}
}

// check returns the error of iptables-restore for the rules of ports.
func (f *family) check(ctx context.Context, ports []*intent.ServicePort) error {
	entries := chain{name: chainTry}
	d := difference{table: tableNAT, fill: f.natChains()}
	for _, p := range ports {
		chains, byAddr, byPort := f.serviceChains(p)
		d.fill = append(d.fill, chains...)
		for _, e := range slices.Concat(byAddr, byPort) {
			entries.add(e.rule)
		}
	}
	d.fill = append(d.fill, entries)
	var in bytes.Buffer
	d.writeTo(&in)
	p := f.programs
	if _, err := p.run(ctx, p.restore, &in, "--noflush", "--test", "--wait", strconv.Itoa(p.cfg.lockWait())); err != nil {
		return fmt.Errorf("test rules: %s: %w", p.restore, err)
	}
	return nil
}
