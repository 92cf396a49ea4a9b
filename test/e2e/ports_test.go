package e2e

import (
	"fmt"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestNodesOwnQuestionsShareItsPortsWithAService: the CNI masquerades what a node
// asks an endpoint elsewhere, from ports that it draws, and a NodePort's flows to the
// same endpoint have ports of the node too. Neither knows of the other; each gets
// its answers all the same. Without that some ten questions were lost here.
func TestNodesOwnQuestionsShareItsPortsWithAService(t *testing.T) {
	spec := topology.DefaultSpec("e2e-ports")
	spec.Masquerade = true
	e := startSpec(t, spec)
	s := e.Load(t, nodePort("a0"))
	for i := range 16 {
		for _, f := range []flows.Flow{{From: "b", To: flows.ClusterIP}, {From: "client0", To: flows.NodePort("b")}} {
			p := e.MustProbe(t, f.From)
			for _, combo := range flows.AllCombos {
				if combo.Protocol() != "udp" {
					continue
				}
				st := stream{fmt.Sprintf("stream %d from %s to %s, %s", i, f.From, f.To, combo), p}
				_, err := p.Do(t.Context(), probe.Request{
					Op: probe.Stream, Name: st.name, Proto: "new-udp", Dst: s.MustAddress(t, f.To, combo), TimeoutMS: 1000,
				})
				if err != nil {
					t.Fatalf("start %s: %v", st.name, err)
				}
				e.streams = append(e.streams, st)
			}
		}
	}
	e.askMore(t, 200)
	e.endStreams(t)
}
