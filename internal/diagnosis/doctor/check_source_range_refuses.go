package doctor

import (
	"fmt"
	"strings"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// sourceRangeRefuses reports clients that loadBalancerSourceRanges of a Service exclude. That
// may be intended, so the finding is info.
type sourceRangeRefuses struct{}

func (sourceRangeRefuses) Name() string  { return "source ranges" }
func (sourceRangeRefuses) About() string { return "clients that loadBalancerSourceRanges refuse" }

func (sourceRangeRefuses) Find(n *Node) (out []Finding) {
	for _, r := range n.refusals(ReasonSourceRange) {
		f := Finding{
			ID: "source-range-refuses", Severity: Info, Object: serviceObject(r.Service, ""),
			Title:    fmt.Sprintf("Service %s refuses %s by loadBalancerSourceRanges", r.Service, page.Counted(len(r.Clients), "client")),
			Evidence: []string{r.packets(), "the last client asked " + r.Address.String()},
			Numbers:  map[string]float64{"packets": float64(r.Packets), "clients": float64(len(r.Clients))},
			Packets: "Packets from these clients to the Service are dropped, and the clients wait until they give up. Clients in the ranges " +
				"are served.",
			Remedy: "If the clients should be served, add their addresses to loadBalancerSourceRanges. The address of a client may be that of " +
				"a proxy or NAT before this node.",
		}
		if len(r.Allowed) > 0 {
			f.Evidence = append(f.Evidence, "allowed: "+strings.Join(r.Allowed, ", "))
		}
		service, _, _ := strings.Cut(r.Service, ":")
		if namespace, name, ok := strings.Cut(service, "/"); ok {
			f.Commands = []string{fmt.Sprintf("kubectl --namespace %s edit service %s", escape.Shell(namespace), escape.Shell(name))}
		}
		out = append(out, f)
	}
	return out
}
