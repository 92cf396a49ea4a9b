package iptables

import (
	"bytes"
	"context"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/nft"
)

// kernelHasOwn reports whether the kernel holds chains of the agent in a variant, in the
// calling thread's network namespace. It needs no program and creates no tables.
func kernelHasOwn(v Variant) (bool, error) {
	if v == NFT {
		return nftHasOwn()
	}
	for _, f := range []model.Family{model.IPv4, model.IPv6} {
		if held, err := legacyHasOwn(f); held || err != nil {
			return held, err
		}
	}
	return false, nil
}

// legacyHasOwn reads only existing tables; reading another would create it. A chain
// begins with an entry that holds its name.
func legacyHasOwn(f model.Family) (held bool, err error) {
	names, err := kernel.LegacyTables(f == model.IPv6)
	if err != nil {
		return false, err
	}
	for _, table := range names {
		err := withEntries(table, f, func(entries []byte) {
			held = held || bytes.Contains(entries, []byte(chainPrefix))
		})
		if err != nil {
			return false, err
		}
	}
	return held, nil
}

// nftHasOwn looks for chain names of the agent in the families that iptables-nft and
// ip6tables-nft use.
func nftHasOwn() (bool, error) {
	var c nft.Conn
	defer c.Close()
	chains, err := c.Chains(context.Background())
	return slices.ContainsFunc(chains, func(l *nft.ListedChain) bool {
		return (l.Table.Family == unix.NFPROTO_IPV4 || l.Table.Family == unix.NFPROTO_IPV6) && strings.HasPrefix(l.Name, chainPrefix)
	}), err
}
