package proxymode

import (
	"context"
	"log/slog"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// PolicyConfig is how a node with a proxy mode decides about do-not-track policies.
func PolicyConfig(node, proxyName, mode string) policy.Config {
	return policy.Config{NodeName: node, ProxyName: proxyName, Netfilter: UsesNetfilter(mode), GivenAway: givenToNetfilter}
}

// givenToNetfilter returns, for each port of a Service, whether the eBPF dataplane
// leaves it to its fallback.
func givenToNetfilter(s *model.Service) []bool {
	out := make([]bool, len(s.Ports))
	for i, h := range intent.HelperOf(s) {
		out[i] = ebpf.GivesAway(s.Ports[i].Protocol, h) != nil
	}
	return out
}

// OpenPolicies opens the table of do-not-track policies. It is a table of nf_tables
// with every --proxy-mode. On a kernel without nf_tables, applying a policy is an error.
func OpenPolicies(ctx context.Context, log *slog.Logger) dataplane.Policies {
	p, err := nftables.NewPolicies(ctx, "", log)
	if err != nil {
		log.Info("do-not-track policies cannot be applied", "err", err)
		return noPolicies{err}
	}
	return p
}

// Bypass returns the first backend if its untracked packets bypass netfilter, else nil.
func Bypass(backends []dataplane.Backend) dataplane.Bypass {
	b, _ := backends[0].(dataplane.Bypass)
	return b
}

// noPolicies applies none, and says why.
type noPolicies struct{ err error }

// Apply fails; there is nothing yet that could change.
func (p noPolicies) Apply(context.Context, policy.Changes) error { return p.err }

// Replace fails unless there is nothing to apply.
func (p noPolicies) Replace(_ context.Context, s policy.State) error {
	if len(s.Targets) == 0 {
		return nil
	}
	return p.err
}

// Repair does what Replace does.
func (p noPolicies) Repair(ctx context.Context, s policy.State) error { return p.Replace(ctx, s) }

// HasPolicies reports none.
func (p noPolicies) HasPolicies(context.Context) (bool, error) { return false, nil }

// Drifted never receives.
func (p noPolicies) Drifted() <-chan struct{} { return nil }

// Repaired finds nothing.
func (p noPolicies) Repaired() (r dataplane.Repair) { return r }

// Close does nothing.
func (p noPolicies) Close() error { return nil }
