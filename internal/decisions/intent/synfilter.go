package intent

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"spillway.dev/spillway/internal/facts/model"
)

// SYNFilterAnnotation says how many SYNs each CPU of a node takes for a TCP port of a Service in
// a second. Clients beyond that must prove their address first, which a flood of forged SYNs
// cannot.
const SYNFilterAnnotation = "spillway.dev/syn-filter"

// synLimitOf returns the number of SYNs, or 0: all.
func (c *Config) synLimitOf(svc *model.Service, complain func(field, what string)) uint16 {
	text, annotated := svc.Annotations[SYNFilterAnnotation]
	if !annotated {
		return 0
	}
	field := annotationField(SYNFilterAnnotation)
	n, err := strconv.ParseUint(text, 10, 16)
	switch {
	case err != nil || n == 0:
		complain(field, fmt.Sprintf("%q is not a number of SYNs a second, and none is filtered; use 1 to %d", text, math.MaxUint16))
		return 0
	case !hasProtocol(svc, model.TCP):
		complain(field, "has no effect: the Service has no TCP port, and no other protocol has SYNs")
		return 0
	case !c.FilterSYNs:
		complain(field, "has no effect on this node: its agent needs --proxy-mode ebpf and --xdp auto")
		return 0
	}
	return uint16(n)
}

func hasProtocol(svc *model.Service, proto model.Protocol) bool {
	return slices.ContainsFunc(svc.Ports, func(p model.ServicePort) bool { return p.Protocol == proto })
}

// synLimitOf returns ServicePort.SYNLimit of the ports of a protocol.
func (p *plan) synLimitOf(proto model.Protocol) uint16 {
	if proto != model.TCP {
		return 0
	}
	return p.synLimit
}
