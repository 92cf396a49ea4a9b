package kubeobject

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// addr parses an address.
func (c *checker) addr(p *field.Path, s string) (netip.Addr, bool) {
	a, why, remedy := parseAddr(s)
	if why != "" {
		c.invalidf(p, "%s; %s", why, remedy)
	}
	return a, why == ""
}

// parseAddr parses an address, or returns what is wrong with it and the remedy. It refuses
// IPv4 written as IPv6, which programs have parsed in different ways.
func parseAddr(s string) (_ netip.Addr, why, remedy string) {
	a, err := netip.ParseAddr(decimal(s))
	switch {
	case err != nil:
		return netip.Addr{}, fmt.Sprintf("%q is not an IP address", s), "write one such as 192.0.2.1 or 2001:db8::1"
	case a.Zone() != "":
		return netip.Addr{}, fmt.Sprintf("%q has a zone, which is valid only on one machine", s),
			fmt.Sprintf("write the address without %q", "%"+a.Zone())
	case a.Is4In6():
		return netip.Addr{}, fmt.Sprintf("%q is an IPv4-mapped IPv6 address", s), fmt.Sprintf("write %q", a.Unmap())
	}
	return a, "", ""
}

// decimal returns an address or a CIDR without leading zeros in its octets and its length. kube-proxy
// reads them as decimal too (ParseIPSloppy). API servers keep them in objects of earlier releases, and
// refuse them in new ones since 1.36 alone (KEP-4858).
func decimal(s string) string {
	host, bits, isRange := strings.Cut(s, "/")
	octets := strings.Split(host, ".")
	if len(octets) != 4 {
		octets = []string{host}
	} else {
		for i, o := range octets {
			octets[i] = withoutZeros(o)
		}
	}
	if host = strings.Join(octets, "."); !isRange {
		return host
	}
	return host + "/" + withoutZeros(bits)
}

// withoutZeros returns a number without leading zeros, and any other text as it is.
func withoutZeros(s string) string {
	if strings.Trim(s, "0123456789") != "" || len(s) < 2 {
		return s
	}
	return cmp.Or(strings.TrimLeft(s, "0"), "0")
}

// prefix parses a CIDR. Leading zeros are ignored and bits beyond the prefix length are
// cleared, as Kubernetes does.
func (c *checker) prefix(p *field.Path, s string) (netip.Prefix, bool) {
	n, ok := c.parsePrefix(p, decimal(s))
	return n.Masked(), ok
}

// exactPrefix parses a CIDR. It refuses bits beyond the prefix length: the author of
// 10.0.0.1/8 may mean one address, or a range of 16 million.
func (c *checker) exactPrefix(p *field.Path, s string) (netip.Prefix, bool) {
	n, ok := c.parsePrefix(p, s)
	if exact := n.Masked(); ok && n != exact {
		one := netip.PrefixFrom(n.Addr(), n.Addr().BitLen())
		c.invalidf(p, "%q has bits set after the prefix length; write %s for the range, or %s for one address", s, exact, one)
		return netip.Prefix{}, false
	}
	return n, ok
}

func (c *checker) parsePrefix(p *field.Path, s string) (netip.Prefix, bool) {
	n, err := netip.ParsePrefix(s)
	switch {
	case err != nil && decimal(s) != s:
		c.invalidf(p, "%q has a leading zero, which some programs read as octal; write the CIDR without it", s)
	case err != nil:
		c.invalidf(p, "%q is not a CIDR such as 192.0.2.0/24 or 2001:db8::/64", s)
	case n.Addr().Is4In6():
		c.invalidf(p, "%q is an IPv4-mapped IPv6 range; write it as IPv4", s)
	default:
		return n, true
	}
	return netip.Prefix{}, false
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// refuse reports an address that no Service may have, because it would cut a node off
// from itself or its neighbors.
func (c *checker) refuse(p *field.Path, a netip.Addr, linkLocal bool) bool {
	why := unusable(a, linkLocal)
	if why != "" {
		c.invalidf(p, "%s is %s; use one that a packet from another machine can carry", a, why)
	}
	return why != ""
}

// unusable returns the kind of an address that packets between machines cannot carry,
// else "". linkLocal includes link-local addresses.
func unusable(a netip.Addr, linkLocal bool) string {
	switch {
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsMulticast():
		return "a multicast address"
	case a == broadcast:
		return "the broadcast address"
	case linkLocal && a.IsLinkLocalUnicast():
		return "a link-local address"
	}
	return ""
}

// addrs parses a list of addresses that a Service may have.
func (c *checker) addrs(p *field.Path, list []string, linkLocal bool) []netip.Addr {
	var out []netip.Addr
	for i, s := range list {
		if a, ok := c.addr(p.Index(i), s); ok && !c.refuse(p.Index(i), a, linkLocal) {
			out = append(out, a)
		}
	}
	return out
}
