package iptables

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
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
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(nfnlSubsysNFTables<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
		msgs, err := req.Execute(unix.NETLINK_NETFILTER, nfnlSubsysNFTables<<8|unix.NFT_MSG_NEWCHAIN)
		switch {
		case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT):
			return false, nil // a kernel without nf_tables
		case err != nil && !errors.Is(err, nl.ErrDumpInterrupted):
			return false, fmt.Errorf("read chains of nf_tables: %w", err)
		}
		for _, m := range msgs {
			attrs, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
			if err != nil {
				return false, fmt.Errorf("read chains of nf_tables: %w", err)
			}
			for _, a := range attrs {
				if a.Attr.Type == unix.NFTA_CHAIN_NAME && bytes.HasPrefix(a.Value, []byte(chainPrefix)) {
					return true, nil
				}
			}
		}
	}
	return false, nil
}
