package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// Backend is the iptables dataplane.
type Backend struct {
	cfg      Config
	turn     *semaphore.Weighted // one write or comparison at a time
	variant  Variant
	families []*family
	node     intent.Node
	// known reports that the kernel holds the desired state unless another program
	// changed it. If false, the next sync is a full one.
	known    bool
	verified time.Time        // time of the last comparison with the kernel
	took     time.Duration    // duration of that comparison
	repaired dataplane.Repair // see Repaired
	earlier  *found           // rules of an earlier run with the other variant; they serve until the first sync
	metrics  *metrics
}

// family is one address family: its programs, and the rules that its tables must hold.
type family struct {
	*ruleset
	programs *programs
	lacks    map[string]error // optional features that the kernel lacks
	// seen is the fingerprint of tables that a comparison found correct, rule by rule. A
	// write makes it invalid.
	seen fingerprint
	have map[intent.Helper]bool // helpers that the kernel has
	// raw reports that tables raw and mangle may hold chains of the agent that nothing
	// needs. It is valid if looked is set, after the search for an earlier run's chains.
	raw, looked bool
}

var _ dataplane.Backend = (*Backend)(nil)

// New finds the programs, chooses the variant that the node's other programs use, and
// tests the kernel's features. Its error is one line that names the missing part. Rules
// of an earlier run stay until Replace.
func New(ctx context.Context, cfg Config) (dataplane.Backend, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure dataplane iptables: %w", err)
	}
	if err := kernel.NeedCapability("iptables", unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"); err != nil {
		return nil, err
	}
	variant, use, other, why, err := chooseVariant(ctx, &cfg)
	if err != nil {
		return nil, err
	}
	if variant == Legacy { // it talks to the kernel through a raw socket
		if err := kernel.NeedCapability("iptables-legacy", unix.CAP_NET_RAW, "CAP_NET_RAW"); err != nil {
			return nil, err
		}
	}
	cfg.Log.Info("iptables variant chosen", "variant", variant, "reason", why)
	b := &Backend{cfg: cfg, turn: semaphore.NewWeighted(1), variant: variant, metrics: newMetrics()}
	if other != nil && other.own {
		b.earlier = other
	}
	for _, f := range servedFamilies() {
		p := use.v4
		if f == model.IPv6 {
			p = use.v6
		}
		fam := &family{programs: p, ruleset: newRuleset(newNodeInputs(f, intent.Node{}, false)), have: map[intent.Helper]bool{}}
		if fam.lacks, err = tryFeatures(ctx, p, f); err != nil {
			return nil, err
		}
		b.families = append(b.families, fam)
	}
	return b, nil
}

// servedFamilies leaves out IPv6 on a kernel that was booted without it.
func servedFamilies() []model.Family {
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		return []model.Family{model.IPv4}
	}
	return []model.Family{model.IPv4, model.IPv6}
}

// Name is the value of --proxy-mode.
func (b *Backend) Name() string { return "iptables" }

// CanCarry refuses a port that needs a feature which the kernel lacks.
func (b *Backend) CanCarry(p *intent.ServicePort) error {
	f := b.family(p.ID.Family)
	switch {
	case f == nil:
		return fmt.Errorf("%s: this kernel has no such network", p.ID.Family)
	case p.ID.Protocol == model.SCTP && f.lacks[featureSCTP] != nil:
		return fmt.Errorf("SCTP: this kernel's netfilter lacks it: %w", f.lacks[featureSCTP])
	case p.Affinity > 0 && f.lacks[featureRecent] != nil:
		return fmt.Errorf("session affinity: this kernel's netfilter lacks the match recent: %w", f.lacks[featureRecent])
	}
	return nil
}

func (b *Backend) family(f model.Family) *family {
	for _, fam := range b.families {
		if fam.ruleset.family == f {
			return fam
		}
	}
	return nil
}

var _ dataplane.Comparer = (*Backend)(nil)

// Differences implements dataplane.Comparer, by the chains in table nat.
func (b *Backend) Differences(ctx context.Context, id intent.PortID, limit int) ([]string, error) {
	if err := b.turn.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("wait for a write: %w", err)
	}
	defer b.turn.Release(1)
	f := b.family(id.Family)
	if f == nil || !b.known {
		return nil, errors.New("the last write failed, so it is not known what the kernel should hold")
	}
	p := f.ports[id]
	if p == nil || f.seen.same(newFingerprint(f.programs.variant, f.ruleset.family, f.tables())) {
		return nil, nil
	}
	have, err := f.programs.readTable(ctx, tableNAT, nil)
	if err != nil {
		return nil, err
	}
	found := describeDifferences(f.ruleset.family, []difference{{table: tableNAT, have: have, fill: f.changed(p, have),
		edits: have.editJumps(f.jumpsOf(tableNAT))}})
	return found[:min(limit, len(found))], nil
}

// Apply writes the chains that the changes alter. It writes everything if the node
// changed, if an earlier write failed, or if so much changes that the order of chains
// matters. The first call should be Replace, since Apply does not know the chains of an
// earlier process.
func (b *Backend) Apply(ctx context.Context, c intent.Changes) error {
	if err := b.turn.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.turn.Release(1)
	if c.Node != nil {
		b.node = *c.Node
		if b.onNodeUpdate() {
			b.known = false
		}
	}
	failed := map[intent.PortID]error{}
	upserts := b.checkHelpers(ctx, c.Upserts, failed)
	diffs := make([][]difference, len(b.families))
	for i, f := range b.families {
		f.raw = f.raw || len(f.helped) > 0
		services := f.apply(upserts, c.Deletes)
		help, full := f.recomputeHelpers()
		diffs[i] = append(help, services)
		if full || b.variant == NFT && slices.ContainsFunc(diffs[i], func(d difference) bool { return d.many() }) {
			b.known = false // other jumps; or the order depends on the kernel's chains
		}
	}
	write := func() error { return b.writeChanged(ctx, diffs) }
	if !b.known {
		write = func() error { return b.writeAll(ctx) }
	}
	if err := b.withoutRefused(ctx, write(), failed); err != nil {
		return err
	}
	return dataplane.PortErrorsOf(failed)
}

// onNodeUpdate stores the state of the node, and reports whether that changes rules.
func (b *Backend) onNodeUpdate() bool {
	changed := false
	for _, f := range b.families {
		inputs := newNodeInputs(f.ruleset.family, b.node, liberal())
		inputs.sockets = f.sockets
		if inputs.equal(&f.nodeInputs) {
			continue
		}
		changed = true
		ports := f.ports
		f.raw = f.raw || len(f.helped) > 0
		f.ruleset = newRuleset(inputs)
		for _, p := range ports {
			f.apply([]*intent.ServicePort{p}, nil)
		}
		f.recomputeHelpers()
	}
	return changed
}

// liberal reports whether conntrack accepts TCP packets outside the window. If it cannot
// read that, nothing is tracked yet, and the default is false.
func liberal() bool {
	v, err := kernel.ReadSysctl("net.netfilter.nf_conntrack_tcp_be_liberal")
	return err == nil && v != "0"
}

// Replace compares all rules with the kernel's and writes those that differ.
func (b *Backend) Replace(ctx context.Context, s intent.State) error {
	if err := b.turn.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.turn.Release(1)
	b.node = s.Node
	changed := b.onNodeUpdate()
	failed := map[intent.PortID]error{}
	ports := b.checkHelpers(ctx, s.Ports, failed)
	for _, f := range b.families {
		if !f.holds(ports) {
			f.raw = f.raw || len(f.helped) > 0
			f.ruleset = newRuleset(f.nodeInputs)
			f.apply(ports, nil)
			f.recomputeHelpers()
			changed = true
		}
	}
	b.known = b.known && !changed
	if err := b.withoutRefused(ctx, b.writeAll(ctx), failed); err != nil {
		return err
	}
	return dataplane.PortErrorsOf(failed)
}

// Applied returns the IDs of the Service ports that the kernel serves, for tests. These
// are the ports that a dispatch names and whose rules are unchanged.
func (b *Backend) Applied(ctx context.Context) (intent.State, error) {
	var s intent.State
	for _, f := range b.families {
		ids, err := f.served(ctx, b.known)
		if err != nil {
			return s, err
		}
		for _, id := range ids {
			s.Ports = append(s.Ports, &intent.ServicePort{ID: id})
		}
	}
	sortPorts(s.Ports)
	return s, nil
}

// Close does nothing: all programs have ended, and the rules stay.
func (b *Backend) Close() error { return nil }
