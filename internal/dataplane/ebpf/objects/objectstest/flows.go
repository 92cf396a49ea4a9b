package objectstest

import (
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// Timeouts are different for each state of a flow.
var Timeouts = objects.Timeouts{
	TCPNew: 60 * time.Second, TCPEstablished: 600 * time.Second, TCPClosing: 120 * time.Second,
	TCPClosed: 100 * time.Second, UDPNew: 70 * time.Second, UDP: 80 * time.Second,
}

// Flow returns the n-th flow, as the programs make it: both directions. seen is in seconds since boot.
func Flow(n uint32, proto model.Protocol, state objects.TCFlowState, seen uint32) (keys [2]objects.TCTuple, flows [2]objects.TCFlow) {
	client, service, node, endpoint := objects.TCAddr{W: [4]uint32{n}}, objects.TCAddr{W: [4]uint32{1}}, objects.TCAddr{W: [4]uint32{2}},
		objects.TCAddr{W: [4]uint32{3, n}}
	keys[0] = objects.TCTuple{Saddr: client, Daddr: service, Sport: 1, Dport: 2, Proto: uint8(proto), Family: uint8(model.IPv6)}
	flows[0] = objects.TCFlow{Saddr: node, Daddr: endpoint, Sport: 3, Dport: 4, State: uint8(state), Seen: seen,
		Flags: uint16(objects.TCFlowFlagsFLOW_SNAT)}
	keys[1] = objects.TCTuple{Saddr: endpoint, Daddr: node, Sport: 4, Dport: 3, Proto: uint8(proto), Family: uint8(model.IPv6)}
	flows[1] = objects.TCFlow{Saddr: service, Daddr: client, Sport: 2, Dport: 1, State: uint8(state), Seen: seen,
		Flags: uint16(objects.TCFlowFlagsFLOW_SNAT | objects.TCFlowFlagsFLOW_REPLY)}
	return keys, flows
}

// WantPairs fails if a flow has lost one of its directions.
func WantPairs(t *testing.T, flows map[objects.TCTuple]objects.TCFlow) {
	t.Helper()
	for key, f := range flows {
		reverse := objects.TCTuple{Saddr: f.Daddr, Daddr: f.Saddr, Sport: f.Dport, Dport: f.Sport, Proto: key.Proto, Family: key.Family}
		if _, ok := flows[reverse]; !ok {
			t.Fatalf("%v has lost its other direction", key)
		}
	}
}
