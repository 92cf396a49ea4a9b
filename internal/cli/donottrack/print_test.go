package donottrack

import (
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/diagnosis/donottrackflow"
)

func TestAnExplanationFitsTheTerminal(t *testing.T) {
	addr := netip.MustParseAddr
	e := &donottrackflow.Explanation{
		From: "shop/web-7d4b9c5f6-x2x7k", To: "shop/cache-0", Port: 11211, Protocol: "TCP", Outcome: donottrackflow.Differs,
		Flows: []donottrackflow.FlowOutcome{
			{From: addr("10.244.1.7"), To: netip.MustParseAddrPort("10.244.2.9:11211"), Outcome: "untracked"},
			{From: addr("fd00:10:244:1::7"), To: netip.MustParseAddrPort("[fd00:10:244:2::9]:11211"), Outcome: "tracked"},
		},
		Decisions: []donottrackflow.NodeDecision{{Node: "worker-1", Side: "client",
			Decision: donottrack.Decision{Addr: addr("fd00:10:244:1::7"), SourcePorts: "32768-60999",
				Policy: "shop/memcached-without-conntrack", Field: "spec.egress[0]", Outcome: "untracked",
				Why: "the rule allows every peer on this port, and nothing of the node needs the entry"}}},
		Notes: []string{"The source port is any of 32768 to 60999: give --source-port for one that the client binds."},
	}
	clitest.Pages(t, "explain", e)
}
