package intent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// ForwardingAnnotation says how packets of a Service get to endpoints on other nodes: one of
// Forwardings. Without it, Config.Forwarding decides.
const ForwardingAnnotation = "spillway.dev/forwarding"

// The ways to forward a client's packets to an endpoint on another node.
const (
	// SNAT gives them an address of this node, and the replies come back through it.
	SNAT = "snat"
	// Hybrid leaves TCP the client's address, and the endpoint's node answers the client. The
	// rest is as with SNAT. The Service must choose by Maglev: this node sees one direction, and may
	// forget flows of clients that it cannot prove, or another node may get their packets.
	Hybrid = "hybrid"
	// DSR does so for UDP too. Nothing shows whether datagrams were answered: it is for networks that
	// are known to forward them.
	DSR = "dsr"
)

// Forwardings are the values of ForwardingAnnotation.
var Forwardings = []string{SNAT, Hybrid, DSR}

// forwardingOf returns the way in effect on this node.
func (c *Config) forwardingOf(svc *model.Service, by Balance, complain func(field, what string)) string {
	way, annotated := svc.Annotations[ForwardingAnnotation]
	if !annotated {
		way = cmp.Or(c.Forwarding, SNAT)
	}
	why := ""
	switch {
	case !slices.Contains(Forwardings, way):
		why = fmt.Sprintf("%q is not a way to forward packets, and snat is used; use %s", way, strings.Join(Forwardings, ", "))
	case way == SNAT:
	case !c.CanForwardByDSR:
		why = way + " has no effect on this node, and snat is used: its agent needs --proxy-mode ebpf and --dsr-key-file"
	case by != Maglev:
		why = way + " has no effect, and snat is used: it needs " + BalanceAnnotation + ": maglev"
	case way == Hybrid && !hasProtocol(svc, model.TCP):
		why = "hybrid has no effect, and snat is used: the Service has no TCP port; use dsr"
	default:
		return way
	}
	if annotated && why != "" {
		complain(annotationField(ForwardingAnnotation), why)
	}
	return SNAT
}

// direct reports whether endpoints on other nodes answer the clients of a protocol directly. An
// endpoint without a node may be outside the cluster: it would answer with its own address.
func direct(way string, proto model.Protocol, endpoints []Endpoint) bool {
	return (way == Hybrid && proto == model.TCP || way == DSR && (proto == model.TCP || proto == model.UDP)) &&
		!slices.ContainsFunc(endpoints, func(e Endpoint) bool { return e.NodeUnknown })
}
