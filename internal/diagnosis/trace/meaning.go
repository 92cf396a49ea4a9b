package trace

import (
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
)

// meaning says what a counted verdict means for a connection, and at which step it is
// decided.
type meaning struct {
	step  string
	state State
	text  string
}

// The names of steps that decide.
const (
	stepEntry     = "entry"
	stepProgram   = "program"
	stepPacket    = "packet"
	stepFilter    = "port filter"
	stepFlow      = "existing flow"
	stepFrontend  = "frontend"
	stepEgress    = "egress"
	stepSource    = "source address"
	stepNetfilter = "netfilter"
	stepRanges    = "source ranges"
	stepPolicy    = "traffic policy"
	stepEndpoint  = "endpoint"
	stepSNAT      = "source NAT"
	stepIPsec     = "IPsec"
	stepPort      = "source port"
	stepNextHop   = "next hop"
	stepBypass    = "bypass"
	stepSocket    = "socket hook"
	stepOther     = "other rules"
)

// order is the order of the steps in a report. It is that of the programs (bpf/tc.bpf.c, bpf/lib/serve/first_packet.h) except
// for two steps. The report has egress in the place of the frontend; the programs decide about it after the source
// address. They may find the next hop before the source port, and the report ends with it.
var order = []string{
	stepProgram, stepPacket, stepFilter, stepFlow, stepEgress, stepFrontend, stepSource, stepNetfilter, stepRanges,
	stepPolicy, stepEndpoint, stepSNAT, stepIPsec, stepPort, stepBypass, stepNextHop,
}

// stepOf has the step that a verdict decides at. Verdicts without one decide nothing by themselves.
var stepOf = map[string]string{
	"pass_malformed":        stepPacket,
	"pass_fragment":         stepPacket,
	"translated_direct":     stepNextHop,
	"translated_stack":      stepNextHop,
	"translated_from_stack": stepNextHop,
	"translated_icmp":       stepNextHop,
	"passed_direct":         stepNextHop,
	"rejected_rst":          stepPolicy,
	"rejected_icmp":         stepPolicy,
	"answered_too_big":      stepNextHop,
	"answered_ttl":          stepNextHop,
	"drop_policy_local":     stepPolicy,
	"drop_source_range":     stepRanges,
	"drop_rejected_silent":  stepPolicy,
	"drop_no_backend":       stepEndpoint,
	"drop_snat_ports":       stepPort,
	"drop_no_snat_addr":     stepSNAT,
	"drop_no_route":         stepSNAT,
	"drop_flow_table":       stepPort,
	"drop_rewrite":          stepNextHop,
	"socket_translated":     stepSocket,
	"socket_refused":        stepSocket,
	"socket_timed_out":      stepSocket,
	"pass_conntrack":        stepNetfilter,
	"drop_helper_answers":   stepPort,
	"passed_untracked":      stepNextHop,
	"pass_source":           stepSource,
	"pass_vlan":             stepPacket,
	"drop_no_flow":          stepFlow,
	"rejected_no_flow":      stepFlow,
	"drop_xfrm":             stepIPsec,
	"drop_icmp_rate":        stepPolicy,
	"drop_source":           stepSource,
	"drop_dsr":              stepPacket,
	"translated_xdp":        stepNextHop,
	"syn_challenged":        stepSource,
	"syn_proved":            stepSource,
	"drop_syn_form":         stepSource,
	"drop_missed_tail_call": stepProgram,
	"drop_egress_ports":     stepPort,
	"drop_pod_replaced":     stepNextHop,
	"drop_helper_conflict":  stepFlow,
}

// meaningOf returns the meaning of a verdict for a connection.
func meaningOf(name string) meaning {
	v, known := inspect.VerdictOf(name)
	switch {
	case !known:
		return meaning{stepOther, Refused, "this spillway does not know the verdict " + name}
	case v.Effect.Ends():
		return meaning{stepOf[name], Refused, v.Meaning}
	case v.Effect.IsNote():
		return meaning{stepOf[name], Passed, v.Meaning}
	}
	return meaning{stepOf[name], Decided, v.Meaning}
}

// decisive returns the verdict that decided, of those that a dry run has counted.
func decisive(verdicts []string) (name string, m meaning) {
	for _, v := range verdicts {
		got := meaningOf(v)
		if name == "" || got.state == Refused || m.state == Passed {
			name, m = v, got
		}
	}
	return name, m
}
