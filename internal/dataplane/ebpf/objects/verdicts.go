package objects

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// SumVerdicts returns the counters of verdicts, summed over all CPUs, by name.
func SumVerdicts(m *ebpf.Map, names []string) map[string]uint64 {
	out := make(map[string]uint64, len(names))
	var perCPU []uint64
	for i, name := range names {
		if err := m.Lookup(uint32(i), &perCPU); err != nil {
			continue
		}
		for _, n := range perCPU {
			out[name] += n
		}
	}
	return out
}

// VerdictNames reads the names of enum verdict from the object's BTF.
func VerdictNames(spec *ebpf.CollectionSpec) ([]string, error) {
	var e *btf.Enum
	if err := spec.Types.TypeByName("verdict", &e); err != nil {
		return nil, fmt.Errorf("read verdicts from BTF: %w", err)
	}
	names := make([]string, len(e.Values)-1)
	for i := range names {
		names[i] = strings.ToLower(e.Values[i].Name)
	}
	return names, nil
}

// Verdict says what an enum verdict of bpf/abi.h means.
type Verdict struct {
	Effect Effect
	// Meaning is for operators, effect first.
	Meaning string
}

// Effect is what becomes of a packet or of a socket's call.
type Effect uint8

// Effects of verdicts.
const (
	Noted    Effect = iota // nothing: another verdict of the packet decides
	Handled                // the packet goes on, or is answered as the Service asks
	Answered               // answered with an ICMP error, because of the way to the endpoint
	Dropped                // it cannot be forwarded: EVENT_DROPPED
	Refused                // the Service does not serve the client: EVENT_REFUSED
)

// IsNote reports whether another verdict of the packet decides.
func (e Effect) IsNote() bool { return e == Noted }

// Fails reports whether the packet or call is dropped or refused.
func (e Effect) Fails() bool { return e == Dropped || e == Refused }

// Ends reports whether the packet or call does not reach an endpoint.
func (e Effect) Ends() bool { return e == Answered || e.Fails() }

// VerdictOf returns what a verdict means, by its name in VerdictNames; false: it is unknown.
func VerdictOf(name string) (Verdict, bool) {
	v, known := verdicts[name]
	return v, known
}

// verdicts has every verdict. The programs know those that are Refused by verdict_refuses of bpf/abi.h.
var verdicts = map[string]Verdict{
	"pass_other":            {Handled, "not a packet of a Service: the stack handles it unchanged"},
	"pass_malformed":        {Handled, "the headers do not parse: the stack handles the packet"},
	"pass_fragment":         {Handled, "a later fragment without its first one: the stack handles it"},
	"translated_direct":     {Handled, "translated and redirected, past netfilter"},
	"translated_stack":      {Handled, "translated and passed to the stack, with netfilter"},
	"translated_from_stack": {Handled, "translated at egress, after the stack"},
	"translated_icmp":       {Handled, "an ICMP error was translated"},
	"passed_direct":         {Handled, "forwarded unchanged, past netfilter"},
	"flow_created":          {Noted, "a new flow was stored"},
	"rejected_rst":          {Refused, "answered with a TCP reset: the Service has no endpoint"},
	"rejected_icmp":         {Refused, "answered with ICMP port unreachable: the Service has no endpoint"},
	"answered_too_big":      {Answered, "refused with ICMP: larger than the path's MTU"},
	"answered_ttl":          {Answered, "refused with ICMP: time exceeded"},
	"drop_policy_local":     {Refused, "dropped: traffic policy Local, and no endpoint on this node"},
	"drop_source_range":     {Refused, "dropped: the client is not in loadBalancerSourceRanges"},
	"drop_rejected_silent":  {Dropped, "dropped: the Service has no endpoint, and the packet must not be answered"},
	"drop_no_backend":       {Dropped, "dropped: the endpoint was removed during the choice"},
	"drop_snat_ports":       {Dropped, "dropped: no free source port towards the endpoint (SNAT ports exhausted)"},
	"drop_no_snat_addr":     {Dropped, "dropped: the device has no address for SNAT"},
	"drop_no_route":         {Dropped, "dropped: no route to the endpoint"},
	"drop_flow_table":       {Dropped, "dropped: the flow could not be stored"},
	"drop_rewrite":          {Dropped, "dropped: the kernel refused to rewrite the packet"},
	"flow_revived":          {Noted, "an evicted entry of the flow was restored"},
	"flow_conflict":         {Noted, "another flow has the tuple of an evicted entry: the packet is handled without the flow"},
	"socket_translated":     {Handled, "the socket connects to the endpoint instead of the Service"},
	"socket_refused":        {Refused, "connect failed with ECONNREFUSED: the Service has no endpoint"},
	"socket_timed_out":      {Refused, "connect failed with ETIMEDOUT: traffic policy Local or a source range"},
	"pass_conntrack":        {Handled, "netfilter knows the connection and handles it by its own entry"},
	"helper_asked":          {Noted, "the server may answer from another port"},
	"helper_answered":       {Noted, "the server answered from another port"},
	"drop_helper_answers":   {Dropped, "dropped: too many ports of the server answer one request"},
	"port_changed":          {Noted, "the stack's port was a flow's, and was changed"},
	"passed_untracked":      {Handled, "forwarded unchanged, past netfilter: a do-not-track policy allows it"},
	"pass_source":           {Handled, "the source address does not belong to the device: the stack handles the packet unchanged"},
	"pass_vlan":             {Handled, "tagged: the VLAN's own device handles the packet"},
	"flow_replaced":         {Noted, "an unconfirmed flow lost its place or port to this one"},
	"drop_no_flow":          {Dropped, "dropped: no connection is known for the packet"},
	"rejected_no_flow":      {Dropped, "answered with a TCP reset: no connection is known for the packet"},
	"flow_over_share":       {Noted, "the client has half of the flow table"},
	"drop_icmp_rate":        {Dropped, "not answered: the answer would exceed the rate of ICMP errors"},
	"drop_xfrm":             {Dropped, "dropped: an IPsec policy selects the packet, and a redirect would bypass IPsec"},
	"drop_source":           {Dropped, "dropped: the source address does not belong to the packet's device"},
	"dsr_announced":         {Noted, "the packet tells the endpoint's node which Service the client asked for"},
	"drop_dsr":              {Dropped, "dropped: it announces a connection for DSR, and no node with this cluster's key wrote that"},
	"dsr_unanswered":        {Noted, "the endpoint has not answered the client directly: the packet gets the node's address"},
	"translated_xdp":        {Handled, "translated and sent by the XDP program"},
	"syn_challenged":        {Handled, "a flood of SYNs: the client is made to prove its address"},
	"syn_proved":            {Handled, "the client has proved its address"},
	"drop_syn_form":         {Dropped, "dropped: a SYN with IP options or in fragments, and the Service has a SYN filter"},
	"dsr_encapsulated":      {Noted, "the packet travels within a datagram to the endpoint's node, because the network drops IP options"},
	"dsr_probed":            {Noted, "the packet is a probe of another node's agent, and it was answered"},
	"drop_missed_tail_call": {Dropped,
		"dropped: the program behind that of the device is gone, as if the pins in tailcalls/ had been removed"},
	"egress_created":       {Noted, "the pod's connection to the outside gets the node's address"},
	"drop_egress_ports":    {Dropped, "dropped: no free source port towards the destination outside"},
	"drop_pod_replaced":    {Dropped, "dropped: the pod that asked is gone, and another has its address"},
	"drop_helper_conflict": {Dropped, "dropped: a server's answer from another port, to ports that another flow has by now"},
}
