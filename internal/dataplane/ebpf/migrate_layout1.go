package ebpf

import (
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// Version 1 had no sequence numbers. It marked a connection as established after the
// endpoint's answer. It had no map features_seen; the same flags were in stack_flows.

// flowV1 is struct flow of version 1.
type flowV1 struct {
	Saddr, Daddr  tcAddr
	Sport, Dport  uint16
	Backend       uint32
	Service       uint32
	Seen          uint32
	State, Flags  uint8
	WayMtu        uint16
	WaySeen       uint32
	WayIfindex    uint32
	WayKind       uint32
	WayMacs       [12]uint8
	HelperPort    uint16
	Helper, Ended uint8
}

// States, flags and ends of version 1.
const (
	v1New = iota + 1
	v1Established
	v1Closing
	v1Closed

	v1Stream   = 1 << 7 // of UDP; the same bit marks an RST of TCP
	v1Answered = 4
)

var statesFromV1 = map[uint8]tcFlowState{
	v1New: tcFlowStateFLOW_NEW, v1Established: tcFlowStateFLOW_ESTABLISHED,
	v1Closing: tcFlowStateFLOW_CLOSING, v1Closed: tcFlowStateFLOW_CLOSED,
}

// flowFromV1 returns a flow without FLOW_TRACKED: the programs learn its sequence
// numbers from its packets. A connection in its handshake is left out, because the
// client repeats its SYN.
func flowFromV1(k tcTuple, f flowV1) (tcTuple, tcFlow, bool) {
	state, known := statesFromV1[f.State]
	tcp := model.Protocol(k.Proto) == model.TCP
	if !known || tcp && state == tcFlowStateFLOW_NEW {
		return k, tcFlow{}, false
	}
	flags := tcFlowFlags(f.Flags)
	if tcp {
		flags |= tcFlowFlagsFLOW_CONFIRMED
	} else if flags&v1Stream != 0 {
		flags = flags&^v1Stream | tcFlowFlagsFLOW_STREAM
	}
	newer := tcFlow{
		Saddr: f.Saddr, Daddr: f.Daddr, Sport: f.Sport, Dport: f.Dport,
		Backend: f.Backend, Service: f.Service, Seen: seenFromV1(f.Seen),
		Flags: uint16(flags), State: uint8(state), Helper: f.Helper, HelperPort: f.HelperPort,
	}
	if f.Ended == v1Answered {
		newer.End = uint8(tcRequestProgressREQUEST_ANSWERED)
		newer.Answers = uint16(f.WayIfindex)
	}
	return k, newer, true
}

// seenFromV1 converts whole seconds since boot to the programs' clock.
func seenFromV1(seen uint32) uint32 {
	return bootSeconds() - (uint32(monotonic()/int64(time.Second)) - seen)
}

// settingsFromV1 leaves out the settings: the agent writes them before the hooks switch
// to the new programs.
func settingsFromV1(e entry) (entry, bool, error) { return e, false, nil }
