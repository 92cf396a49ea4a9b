package proxymode

import (
	"context"
	"log/slog"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// DoNotTrackConfig is how a node with a proxy mode decides about do-not-track policies.
func DoNotTrackConfig(node, proxyName, mode string) donottrack.Config {
	return donottrack.Config{NodeName: node, ProxyName: proxyName, Netfilter: UsesNetfilter(mode), NeedsFallback: needsFallback}
}

// needsFallback returns, for each port of a Service, whether the eBPF dataplane
// leaves it to its fallback.
func needsFallback(s *model.Service) []bool {
	out := make([]bool, len(s.Ports))
	for i, h := range intent.HelperOf(s) {
		out[i] = ebpf.NeedsFallback(s.Ports[i].Protocol, h) != nil
	}
	return out
}

// OpenDoNotTrack opens the table of do-not-track policies. It is a table of nf_tables
// with every --proxy-mode. On a kernel without nf_tables, applying a policy is an error.
func OpenDoNotTrack(ctx context.Context, log *slog.Logger) dataplane.DoNotTrack {
	p, err := nftables.NewDoNotTrack(ctx, "", log)
	if err != nil {
		log.Info("do-not-track policies cannot be applied", "err", err)
		return noDoNotTrack{err}
	}
	return p
}

// Bypass returns the first backend if its untracked packets bypass netfilter, else nil.
func Bypass(backends []dataplane.Backend) dataplane.Bypass {
	b, _ := backends[0].(dataplane.Bypass)
	return b
}

// noDoNotTrack applies none, and says why.
type noDoNotTrack struct{ err error }

// Apply fails; there is nothing yet that could change.
func (p noDoNotTrack) Apply(context.Context, donottrack.Changes) error { return p.err }

// Replace fails unless there is nothing to apply.
func (p noDoNotTrack) Replace(_ context.Context, s donottrack.State) error {
	if len(s.Targets) == 0 {
		return nil
	}
	return p.err
}

// Repair does what Replace does.
func (p noDoNotTrack) Repair(ctx context.Context, s donottrack.State) error { return p.Replace(ctx, s) }

// HasPolicies reports none.
func (p noDoNotTrack) HasPolicies(context.Context) (bool, error) { return false, nil }

// Drifted never receives.
func (p noDoNotTrack) Drifted() <-chan struct{} { return nil }

// Repaired finds nothing.
func (p noDoNotTrack) Repaired() (r dataplane.Repair) { return r }

// Close does nothing.
func (p noDoNotTrack) Close() error { return nil }
