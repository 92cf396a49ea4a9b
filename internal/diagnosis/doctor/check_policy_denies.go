package doctor

import (
	"fmt"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/page"
)

// policyDenies reports packets that a DoNotTrackPolicy denies. That may be intended, so the
// finding is info.
type policyDenies struct{}

func (policyDenies) Name() string  { return "policies" }
func (policyDenies) About() string { return "packets that a DoNotTrackPolicy denies" }

func (policyDenies) Find(n *Node) (out []Finding) {
	if n.Traffic == nil {
		return nil
	}
	for _, d := range n.Traffic.Denials {
		out = append(out, Finding{
			ID: "policy-denies", Severity: Info, Object: Object{Kind: model.KindDoNotTrackPolicy, Name: d.Policy},
			Title:    fmt.Sprintf("DoNotTrackPolicy %s denies packets", d.Policy),
			Evidence: []string{fmt.Sprintf("%s in the last %.0f s", page.Counted(int(d.Packets), "packet"), d.Window.Seconds())},
			Numbers:  map[string]float64{"packets": float64(d.Packets)},
			Packets:  "Packets of clients that the policy does not name are dropped, and the clients wait until they give up.",
			Remedy:   "If the clients should be served, add them to the peers of the policy. The first command shows them, while they try.",
			Commands: []string{"spillway drops --reason NETFILTER_DROP --for 10s", "kubectl edit donottrackpolicy " + escape.Shell(d.Policy)},
		})
	}
	return out
}
