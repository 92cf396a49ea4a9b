package main

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

// policyConfig is how this node reads do-not-track policies.
func policyConfig(c agentConfig) policy.Config {
	return policyConfigOf(c.NodeName, c.ProxyName, c.ProxyMode)
}

func policyConfigOf(node, proxyName, proxyMode string) policy.Config {
	return policy.Config{NodeName: node, ProxyName: proxyName, Netfilter: modeUsesNetfilter(proxyMode), GivenAway: givenToNetfilter}
}

// givenToNetfilter says which ports of a Service the eBPF dataplane gives to netfilter's.
func givenToNetfilter(s *model.Service) []bool {
	out := make([]bool, len(s.Ports))
	for i, h := range intent.HelperOf(s) {
		out[i] = ebpf.GivesAway(s.Ports[i].Protocol, h) != nil
	}
	return out
}

// newPolicies opens the table of do-not-track policies, which is one of nf_tables
// with every --proxy-mode. Without nf_tables there are none, and it is an error to
// want one.
func newPolicies(ctx context.Context, _ agentConfig, log *slog.Logger) dataplane.Policies {
	p, err := nftables.NewPolicies(ctx, "", log)
	if err != nil {
		log.Info("do-not-track policies cannot be applied", "err", err)
		return noPolicies{err}
	}
	return p
}

// bypass is the dataplane that passes by netfilter what policies leave untracked, if
// the chosen one does.
func bypass(backends []dataplane.Backend) dataplane.Bypass {
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

// HasPolicies reports none.
func (p noPolicies) HasPolicies(context.Context) (bool, error) { return false, nil }

// Drifted never receives.
func (p noPolicies) Drifted() <-chan struct{} { return nil }

// Repaired finds nothing.
func (p noPolicies) Repaired() (r dataplane.Repair) { return r }

// Close does nothing.
func (p noPolicies) Close() error { return nil }
