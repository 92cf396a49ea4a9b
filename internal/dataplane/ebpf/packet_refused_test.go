package ebpf

import (
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/test/must"
)

// A flow is refused if the endpoint's first answer is an RST.
func TestPacketRefusedFlows(t *testing.T) {
	n := newPacketNode(t)
	n.checksComplete = false // see TestPacketAnswers
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		for name, c := range map[string]struct {
			packets []string
			refused bool
		}{
			"RST":                           {[]string{"<R."}, true},
			"no answer":                     {nil, false},
			"SYN-ACK":                       {[]string{"<S."}, false},
			"SYN-ACK, and the client's RST": {[]string{"<S.", "R"}, false},
			"SYN-ACK, and an RST":           {[]string{"<S.", "<R."}, false},
			"connection, and an RST":        {[]string{"<S.", ".", "<R."}, false},
		} {
			t.Run(name, func(t *testing.T) {
				n.forget(t)
				conn := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
				conn.syn(t)
				conn.talk(t, c.packets...)
				var found []dataplane.Flow
				must.Do(t, n.Flows(t.Context(), func(f dataplane.Flow) bool { found = append(found, f); return true }))
				if len(found) != 1 || found[0].Refused != c.refused {
					t.Errorf("flows %+v, want one with refused %v", found, c.refused)
				}
			})
		}
	})
}
