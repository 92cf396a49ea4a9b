package trace

import (
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
)

// meaning says what a counted verdict means for a connection, and at which step it is
// decided.
type meaning struct {
	step  string
	state State
	text  string // "": inspect.Meaning has it
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

// order is the order of the steps in a report. It is that of the programs (bpf/lib/tc.h, bpf/lib/serve.h) except
// for two steps. The report has egress in the place of the frontend; the programs decide about it after the source
// address. They may find the next hop before the source port, and the report ends with it.
var order = []string{
	stepProgram, stepPacket, stepFilter, stepFlow, stepEgress, stepFrontend, stepSource, stepNetfilter, stepRanges,
	stepPolicy, stepEndpoint, stepSNAT, stepIPsec, stepPort, stepBypass, stepNextHop,
}

// meanings has every verdict of bpf/abi.h. Verdicts without a step decide nothing by
// themselves.
var meanings = map[string]meaning{
	"pass_other":            {"", Decided, "not a packet of a Service: the stack handles it unchanged"},
	"pass_malformed":        {stepPacket, Decided, "the headers do not parse: the stack handles the packet"},
	"pass_fragment":         {stepPacket, Decided, "a later fragment without its first one: the stack handles it"},
	"pass_vlan":             {stepPacket, Decided, "tagged: the VLAN's own device handles the packet"},
	"pass_source":           {stepSource, Decided, "the source address does not belong to the device: the stack handles the packet unchanged"},
	"drop_source":           {stepSource, Refused, ""},
	"drop_missed_tail_call": {stepProgram, Refused, ""},
	"drop_dsr":              {stepPacket, Refused, ""},
	"egress_created":        {"", Passed, "the pod's connection to the outside gets the node's address"},
	"drop_egress_ports":     {stepPort, Refused, ""},
	"drop_pod_replaced":     {stepNextHop, Refused, ""},
	"dsr_unanswered":        {"", Passed, "the endpoint has not answered the client directly: the packet gets the node's address"},
	"dsr_encapsulated":      {"", Passed, "the packet travels within a datagram to the endpoint's node, because the network drops IP options"},
	"dsr_probed":            {"", Passed, "the packet is a probe of another node's agent, and it was answered"},
	"dsr_announced":         {"", Passed, "the packet tells the endpoint's node which Service the client asked for"},
	"pass_conntrack":        {stepNetfilter, Decided, "netfilter knows the connection and handles it by its own entry"},
	"passed_direct":         {stepNextHop, Decided, "forwarded unchanged, past netfilter"},
	"passed_untracked":      {stepNextHop, Decided, "forwarded unchanged, past netfilter: a do-not-track policy allows it"},
	"translated_direct":     {stepNextHop, Decided, "translated and redirected, past netfilter"},
	"translated_xdp":        {stepNextHop, Decided, "translated and sent by the XDP program"},
	"drop_syn_form":         {stepSource, Refused, ""},
	"syn_challenged":        {stepSource, Decided, "a flood of SYNs: the client is made to prove its address"},
	"syn_proved":            {stepSource, Decided, "the client has proved its address"},
	"translated_stack":      {stepNextHop, Decided, "translated and passed to the stack, with netfilter"},
	"translated_from_stack": {stepNextHop, Decided, "translated at egress, after the stack"},
	"translated_icmp":       {stepNextHop, Decided, "an ICMP error was translated"},
	"flow_created":          {"", Passed, "a new flow was stored"},
	"flow_revived":          {"", Passed, "an evicted entry of the flow was restored"},
	"flow_replaced":         {"", Passed, "an unconfirmed flow lost its place or port to this one"},
	"flow_over_share":       {"", Passed, "the client has half of the flow table"},
	"port_changed":          {"", Passed, "the stack's port was a flow's, and was changed"},
	"helper_asked":          {"", Passed, "the server may answer from another port"},
	"helper_answered":       {"", Passed, "the server answered from another port"},
	"flow_conflict":         {"", Passed, "another flow has the tuple of an evicted entry: the packet is handled without the flow"},
	"drop_helper_conflict":  {stepFlow, Refused, ""},
	"drop_no_flow":          {stepFlow, Refused, ""},
	"rejected_no_flow":      {stepFlow, Refused, ""},
	"drop_source_range":     {stepRanges, Refused, ""},
	"drop_policy_local":     {stepPolicy, Refused, ""},
	"rejected_rst":          {stepPolicy, Refused, ""},
	"rejected_icmp":         {stepPolicy, Refused, ""},
	"drop_rejected_silent":  {stepPolicy, Refused, ""},
	"drop_no_backend":       {stepEndpoint, Refused, ""},
	"drop_no_snat_addr":     {stepSNAT, Refused, ""},
	"drop_xfrm":             {stepIPsec, Refused, ""},
	"drop_snat_ports":       {stepPort, Refused, ""},
	"drop_flow_table":       {stepPort, Refused, ""},
	"drop_helper_answers":   {stepPort, Refused, ""},
	"drop_no_route":         {stepSNAT, Refused, ""},
	"drop_rewrite":          {stepNextHop, Refused, ""},
	"drop_icmp_rate":        {stepPolicy, Refused, ""},
	"answered_too_big":      {stepNextHop, Refused, "refused with ICMP: larger than the path's MTU"},
	"answered_ttl":          {stepNextHop, Refused, "refused with ICMP: time exceeded"},
	"socket_translated":     {stepSocket, Decided, "the socket connects to the endpoint instead of the Service"},
	"socket_refused":        {stepSocket, Refused, ""},
	"socket_timed_out":      {stepSocket, Refused, ""},
}

// decisive returns the verdict that decided, of those that a dry run has counted.
func decisive(verdicts []string) (name string, m meaning) {
	for _, v := range verdicts {
		got, known := meanings[v]
		if !known {
			got = meaning{stepOther, Refused, "this spillway does not know the verdict " + v}
		}
		if got.text == "" {
			got.text = inspect.Meaning(v)
		}
		if name == "" || got.state == Refused || m.state == Passed {
			name, m = v, got
		}
	}
	return name, m
}
