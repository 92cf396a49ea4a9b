// Package egress decides which connections of this node's pods to the outside get the node's address
// from the dataplane, instead of a masquerade rule of the CNI. The functions are pure.
package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Plan says which packets of this node's pods get the node's address and a source port that no other
// connection to the destination has. The zero value is none of them.
type Plan struct {
	// Sources are the ranges of the pods concerned, sorted. Packets of pods outside of them are left
	// to netfilter.
	Sources []netip.Prefix
	// Keep are the destinations whose packets are left to netfilter, sorted: they keep the pod's
	// address, or a rule decides that this package does not understand. All of a family without
	// Sources is in it.
	Keep []netip.Prefix
	// Addresses are the node's addresses that connections get, sorted: see Plan.ForPods. A family without
	// any gets the address of the route's device.
	Addresses []netip.Addr
}

// PodGroups is the number of groups in which pods share Addresses. The last four bits of a pod's
// address are the number of its group, so all connections of a pod have one address (RFC 4787, REQ-2).
const PodGroups = 16

// ForPods returns the address of each of the PodGroups; nil: the family has no Addresses.
func (p Plan) ForPods(v6 bool) []netip.Addr {
	own := slices.DeleteFunc(slices.Clone(p.Addresses), func(a netip.Addr) bool { return a.Is6() != v6 })
	if len(own) == 0 {
		return nil
	}
	groups := make([]netip.Addr, PodGroups)
	for i := range groups {
		groups[i] = own[i%len(own)]
	}
	return groups
}

// ParseAddresses parses ranges of addresses, separated by commas. Without any, connections get the address of the
// route's device.
func ParseAddresses(text string) (ranges []netip.Prefix, err error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	for _, part := range strings.Split(text, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		switch {
		case err != nil:
			return nil, fmt.Errorf("%q is not an address range: write one like 203.0.113.0/28", part)
		case p != p.Masked() || p.Addr().Is4In6():
			return nil, fmt.Errorf("%q is not how an address range is written: write it like 203.0.113.0/28", part)
		}
		ranges = append(ranges, p)
	}
	return ranges, nil
}

// Equal reports whether two Plans are the same.
func (p Plan) Equal(q Plan) bool {
	return slices.Equal(p.Sources, q.Sources) && slices.Equal(p.Keep, q.Keep) && slices.Equal(p.Addresses, q.Addresses)
}

// Any reports whether the Plan concerns any pod.
func (p Plan) Any() bool { return len(p.Sources) > 0 }
