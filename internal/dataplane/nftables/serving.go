package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// Serving is what a table of Services holds for one address and port.
type Serving struct {
	Service intent.PortID
	Kind    string // ClusterIP, NodePort, ...
	// Sets are the sets and maps that have the frontend. Their names say what follows: drop,
	// masquerade, a pool of endpoints.
	Sets      []string
	Endpoints []netip.AddrPort
}

// FindServing reads the table in the network namespace that enter enters. It returns nil if
// the table does not exist or does not serve the address and port. NodePorts count if nodePorts
// is set.
func FindServing(ctx context.Context, enter Enter, table string, proto model.Protocol, at netip.AddrPort,
	nodePorts bool) (*Serving, error) {
	of := nft.Table{Family: unix.NFPROTO_INET, Name: Config{Table: table}.withDefaults().Table}
	var conn nft.Conn
	if err := enter(conn.Open); err != nil {
		return nil, err
	}
	defer conn.Close()
	found, err := conn.Read(ctx, of, true)
	if err != nil {
		return nil, fmt.Errorf("read table %s: %w", of.Name, err)
	}
	family := model.FamilyOf(at.Addr())
	for _, b := range newLayout().bases() {
		fs := found.Sets[b.frontends.Name]
		if fs == nil || b.family != familyOf(family) || b.nodePort && !nodePorts {
			continue
		}
		key := b.frontendKey(proto, at)
		v := fs.Elements[key]
		if v == nil {
			continue
		}
		s := &Serving{}
		id, kind, _ := parsePort(v.Comment, family)
		s.Service, s.Kind = id, kindNames[kind]
		for _, e := range b.served(found)[key] {
			s.Endpoints = append(s.Endpoints, e.Addr)
		}
		for name, set := range found.Sets {
			for have := range set.Elements {
				if strings.HasPrefix(name, b.frontends.Name) && strings.HasPrefix(have, key) {
					s.Sets = append(s.Sets, name)
					break
				}
			}
		}
		slices.Sort(s.Sets)
		slices.SortFunc(s.Endpoints, netip.AddrPort.Compare)
		s.Endpoints = slices.Compact(s.Endpoints)
		return s, nil
	}
	return nil, nil
}

// frontendKey is the key of an address and port in the sets of a base.
func (b *base) frontendKey(proto model.Protocol, at netip.AddrPort) string {
	var key []byte
	if !b.nodePort {
		key = appendAddr(key, at.Addr())
	}
	return string(appendPort(appendProto(key, proto), at.Port()))
}
