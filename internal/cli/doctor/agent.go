package doctor

import (
	"context"
	"errors"
	"fmt"
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
	netns    uint64 // number of its network namespace; 0: an earlier agent does not tell
	err      error  // of one line; nil also without an agent
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
	out.answered, out.netns = true, resp.NetworkNamespace
	out.findings = slices.DeleteFunc(nodeclient.Findings(resp.Findings), func(f doctor.Finding) bool { return !c.wants(f.ID) })
	return out
}

// wants reports whether only the agent knows findings with an id, and the command line asks for them.
func (c *config) wants(id string) bool {
	i := slices.IndexFunc(doctor.Kinds, func(k doctor.Kind) bool { return k.ID == id })
	return i >= 0 && doctor.Kinds[i].NeedsAgent() && (len(c.only) == 0 || slices.Contains(c.only, id))
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

// examined returns the agent's network namespace, nil if the command does not examine it.
func (a *fromAgent) examined(node *doctor.Node) *doctor.Namespace {
	if a.netns == 0 {
		return node.Own()
	}
	i := slices.IndexFunc(node.Namespaces, func(n doctor.Namespace) bool { return n.Namespace.Inode == a.netns })
	if i < 0 {
		return nil
	}
	return &node.Namespaces[i]
}

// add adds what the agent knows to the findings of a node. It says so if it leaves findings out.
func (a *fromAgent) add(node *doctor.Node, findings []doctor.Finding) []doctor.Finding {
	if a.err != nil && !errors.Is(a.err, context.Canceled) {
		node.Problems = append(node.Problems, doctor.Problem{What: a.err.Error()})
	}
	if !a.answered {
		return findings
	}
	ns := a.examined(node)
	if ns == nil {
		if len(a.findings) > 0 {
			what := fmt.Sprintf("%d findings of the agent, such as %s, are left out", len(a.findings), a.findings[0].ID)
			if len(a.findings) == 1 {
				what = "a finding of the agent, " + a.findings[0].ID + ", is left out"
			}
			node.Problems = append(node.Problems, doctor.Problem{
				What: what + ": its network namespace is not examined; run the command without --netns"})
		}
		return findings
	}
	node.Traffic = &doctor.Traffic{} // examined by the agent
	for _, f := range a.findings {
		if !ns.Namespace.Own {
			f.Namespace = ns.Namespace.String()
		}
		findings = append(findings, f)
	}
	doctor.Sort(findings)
	return findings
}

// notExamined says why the requested findings of the agent were not examined; nil if they were, or
// if add has said it.
func (a *fromAgent) notExamined(node *doctor.Node, only []string) *doctor.Problem {
	ids := doctor.NeedAgent(only)
	switch {
	case len(ids) == 0 || node.Traffic != nil || a.err != nil:
		return nil
	case a.answered:
		return &doctor.Problem{What: strings.Join(ids, ", ") + ": the agent's network namespace is not examined; run the command without --netns"}
	}
	return &doctor.Problem{What: strings.Join(ids, ", ") + ": no agent with these findings runs on this node: they need --proxy-mode ebpf"}
}
