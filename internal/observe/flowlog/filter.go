package flowlog

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/dataplane"
)

// Filter selects events, as FlowFilter of
// api/proto/spillway/node/v1alpha1/node.proto: a zero field selects all, and all fields must
// match.
type Filter struct {
	Namespace, Service string
	Pod                string       // namespace/name of the client or of the endpoint
	Prefix             netip.Prefix // of the address of the client or of the endpoint
	Port               uint16       // of the Service or of the endpoint
	Kinds              []dataplane.FlowEventKind

	since time.Time
}

// ParsePrefix parses an address or a prefix for a Filter; "" is the zero prefix.
func ParsePrefix(text string) (netip.Prefix, error) {
	if text == "" {
		return netip.Prefix{}, nil
	}
	if addr, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()), nil
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return prefix, fmt.Errorf("filter by address %q: write an address or a prefix such as 10.0.0.0/8", text)
	}
	return prefix.Masked(), nil
}

// matches reports whether the filter selects an event.
func (f *Filter) matches(e *Event) bool {
	flow := &e.Flow
	switch {
	case f.Namespace != "" && f.Namespace != flow.Namespace,
		f.Service != "" && f.Service != flow.Service,
		f.Pod != "" && f.Pod != flow.Client.Pod && f.Pod != flow.Endpoint.Pod,
		f.Prefix.IsValid() && !f.Prefix.Contains(flow.Client.Address.Addr()) && !f.Prefix.Contains(flow.Endpoint.Address.Addr()),
		f.Port != 0 && f.Port != flow.ServiceAddress.Address.Port() && f.Port != flow.Endpoint.Address.Port(),
		len(f.Kinds) > 0 && !slices.Contains(f.Kinds, e.Kind):
		return false
	}
	return f.since.IsZero() || !e.Time.Before(f.since)
}
