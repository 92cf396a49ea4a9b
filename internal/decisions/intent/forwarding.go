package intent

import (
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
)

// Forwardings are the values of ForwardingAnnotation.
var Forwardings = []string{SNAT, Hybrid}

// directOf reports whether endpoints on other nodes answer the TCP clients of a Service directly.
func (c *Config) directOf(svc *model.Service, by Balance, complain func(field, what string)) bool {
	way, asked := svc.Annotations[ForwardingAnnotation]
	field := annotationField(ForwardingAnnotation)
	switch {
	case asked && !slices.Contains(Forwardings, way):
		complain(field, fmt.Sprintf("%q is not a way to forward packets, and snat is used; use %s", way, strings.Join(Forwardings, " or ")))
		return false
	case !asked:
		return c.Forwarding == Hybrid && c.CanForwardDirectly && by == Maglev
	case way == SNAT:
		return false
	case !c.CanForwardDirectly:
		complain(field, "hybrid has no effect on this node, and snat is used: its agent needs --proxy-mode ebpf and --dsr-key-file")
		return false
	case by != Maglev:
		complain(field, "hybrid has no effect, and snat is used: it needs "+BalanceAnnotation+": maglev")
		return false
	}
	return true
}
