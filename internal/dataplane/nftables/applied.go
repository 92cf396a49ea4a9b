package nftables

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// state returns the Service ports that the table serves, as far as its elements say. They do
// not say which endpoints a policy has, nor that a frontend with two routes has both.
func state(found *nft.Listing, l *layout) intent.State {
	ports := map[intent.PortID]*intent.ServicePort{}
	for _, b := range l.bases() {
		fam := model.IPv4
		if b.family == nft.IPv6 {
			fam = model.IPv6
		}
		fs := found.Sets[b.frontends.Name]
		if fs == nil {
			continue
		}
		served := b.served(found)
		for key, v := range fs.Elements {
			id, kind, ok := parsePort(v.Comment, fam)
			if !ok {
				continue
			}
			p := ports[id]
			if p == nil {
				p = &intent.ServicePort{ID: id}
				ports[id] = p
			}
			f := intent.Frontend{Kind: kind, Port: binary.BigEndian.Uint16([]byte(key[len(key)-4:]))}
			if !b.nodePort {
				f.Addr, _ = netip.AddrFromSlice([]byte(key[:b.family.Size]))
			}
			p.Frontends = append(p.Frontends, f)
			p.Endpoints = append(p.Endpoints, served[key]...)
		}
	}
	var s intent.State
	for _, p := range ports {
		slices.SortFunc(p.Frontends, func(a, b intent.Frontend) int {
			return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Addr.Compare(b.Addr))
		})
		slices.SortFunc(p.Endpoints, func(a, b intent.Endpoint) int { return a.Addr.Compare(b.Addr) })
		p.Endpoints = slices.Compact(p.Endpoints)
		s.Ports = append(s.Ports, p)
	}
	slices.SortFunc(s.Ports, func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
	return s
}

// served lists the endpoints of each frontend of a base.
func (b *base) served(found *nft.Listing) map[string][]intent.Endpoint {
	out := map[string][]intent.Endpoint{}
	take := func(s *set, keyLen uint32) {
		fs := found.Sets[s.Name]
		if fs == nil {
			return
		}
		for key, v := range fs.Elements {
			if uint32(len(v.Data)) != b.family.Size+4 || uint32(len(key)) < keyLen {
				continue
			}
			addr, _ := netip.AddrFromSlice([]byte(v.Data[:b.family.Size]))
			port := binary.BigEndian.Uint16([]byte(v.Data[b.family.Size:]))
			out[key[:keyLen]] = append(out[key[:keyLen]], intent.Endpoint{Addr: netip.AddrPortFrom(addr, port)})
		}
	}
	keyLen := nft.Len(b.frontends.Key)
	for _, p := range []*pool{&b.inner, &b.outer} {
		take(p.one, keyLen)
		for _, c := range p.class {
			take(c.slots, keyLen)
		}
	}
	return out
}
