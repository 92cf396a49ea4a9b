package doctor

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/diagnosis/doctor"
)

// fromAgent is what the agent of this node adds.
type fromAgent struct {
	findings []doctor.Finding
	err      error // of one line; nil also without an agent
	answered bool
}

// needsAgent reports whether only an agent can find some of the requested findings.
func (c *config) needsAgent() bool {
	return slices.ContainsFunc(doctor.Kinds, func(k doctor.Kind) bool {
		return k.NeedsAgent() && (len(c.only) == 0 || slices.Contains(c.only, k.ID))
	})
}

// askAgent asks the agent for the findings that only it knows. Without an agent there are
// none, unless the command line asks for an agent or for such a finding.
func (c *config) askAgent(ctx context.Context) (out fromAgent) {
	if !c.needsAgent() {
		return out
	}
	d := c.socket.Dialer()
	client := nodeclient.New(d)
	ask, cancel := context.WithTimeout(ctx, nodeclient.Timeout)
	defer cancel()
	resp, err := client.Findings(ask, &nodev1alpha1.FindingsRequest{})
	if nodeclient.Absent(err) && len(c.only) == 0 && !c.socket.Given() {
		return out
	}
	if err != nil {
		out.err = nodeclient.Error("examine Services, which needs the agent", d, err)
		return out
	}
	out.answered = true
	for _, f := range resp.Findings {
		if finding, ok := c.convert(f); ok {
			out.findings = append(out.findings, finding)
		}
	}
	return out
}

// convert returns a finding that only the agent knows and the command line asks for.
func (c *config) convert(f *nodev1alpha1.Finding) (doctor.Finding, bool) {
	i := slices.IndexFunc(doctor.Kinds, func(k doctor.Kind) bool { return k.ID == f.Id })
	if i < 0 || !doctor.Kinds[i].NeedsAgent() || len(c.only) > 0 && !slices.Contains(c.only, f.Id) {
		return doctor.Finding{}, false
	}
	return doctor.Finding{
		ID: f.Id, Severity: doctor.Severity(f.Severity), Title: f.Title, Evidence: f.Evidence, Packets: f.Detail,
		Remedy: f.Fix, Commands: f.Commands, Documentation: f.Documentation,
	}, true
}

// uses asks the agent of this node which Service ports have UDP addresses. Without an answer
// there are none: askAgent reports an agent that fails.
func (c *config) uses(ctx context.Context, addrs []netip.AddrPort) ([]doctor.AddressUse, error) {
	requested := make([]nodeclient.Address, len(addrs))
	for i, a := range addrs {
		requested[i] = nodeclient.Address{Protocol: "udp", AddrPort: a}
	}
	owners, err := nodeclient.NewNames(c.socket.Dialer()).Of(ctx, requested)
	if err != nil {
		return nil, nil
	}
	uses := make([]doctor.AddressUse, len(owners))
	for i, o := range owners {
		uses[i] = doctor.AddressUse{Service: o.Service, EndpointOf: o.EndpointOf}
	}
	return uses, nil
}

// add adds what the agent knows to the findings of a node.
func (a *fromAgent) add(node *doctor.Node, findings []doctor.Finding) []doctor.Finding {
	if a.err != nil && !errors.Is(a.err, context.Canceled) {
		node.Problems = append(node.Problems, doctor.Problem{What: a.err.Error()})
	}
	if a.answered {
		node.Traffic = &doctor.Traffic{} // examined by the agent
	}
	findings = append(findings, a.findings...)
	doctor.Sort(findings)
	return findings
}

// notExamined says why the requested findings of the agent were not examined; nil if they were, or
// if add has said it.
func (a *fromAgent) notExamined(node *doctor.Node, only []string) *doctor.Problem {
	ids := doctor.NeedAgent(only)
	switch {
	case len(ids) == 0 || node.Traffic != nil:
		return nil
	case node.Own() == nil:
		return &doctor.Problem{What: strings.Join(ids, ", ") +
			": the agent is asked only if this command examines its own network namespace, the agent's: leave out --netns, or add here to it"}
	case a.err != nil:
		return nil
	}
	return &doctor.Problem{What: strings.Join(ids, ", ") + ": no agent with these findings runs on this node: they need --proxy-mode ebpf"}
}
