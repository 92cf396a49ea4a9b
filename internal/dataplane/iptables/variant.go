package iptables

import (
	"context"
	"fmt"

	"spillway.dev/spillway/internal/facts/model"
)

// found is the state of one variant in the kernel.
type found struct {
	v4, v6  *programs
	others  int  // rules of other programs
	own     bool // it has chains of the agent
	kubelet bool // it has a chain of kubelet's or iptables-wrappers'
	missing error
}

// readVariant reads the state of a variant. It creates no tables.
func readVariant(ctx context.Context, cfg *Config, v Variant) found {
	var f found
	if f.v4, f.missing = findPrograms(ctx, cfg, v, model.IPv4); f.missing != nil {
		return f
	}
	if f.v6, f.missing = findPrograms(ctx, cfg, v, model.IPv6); f.missing != nil {
		return f
	}
	for _, p := range []*programs{f.v4, f.v6} {
		dumps, err := p.read(ctx, "", nil)
		if err != nil {
			f.missing = err
			return f
		}
		for _, d := range dumps {
			f.others += d.others
			f.own = f.own || len(d.chains) > 0
			f.kubelet = f.kubelet || d.kubelet
		}
	}
	return f
}

// chooseVariant returns the variant that the node's other programs use, because packets
// then traverse all rules in one order. That is the variant with a chain that kubelet or
// iptables-wrappers create for this purpose, else the variant with more rules. Without
// any rules it is nft: a change there is much cheaper and waits for no lock, and new
// kernels lack legacy. chooseVariant also returns the other variant, nil if it is
// missing, and the reason.
func chooseVariant(ctx context.Context, cfg *Config) (chosen Variant, use found, other *found, why string, err error) {
	legacy, nft := readVariant(ctx, cfg, Legacy), readVariant(ctx, cfg, NFT)
	switch {
	case legacy.missing != nil && nft.missing != nil:
		return "", use, nil, "", fmt.Errorf("%w, or use another --proxy-mode", nft.missing)
	case legacy.missing != nil:
		return NFT, nft, nil, "the only one that works here", nil
	case nft.missing != nil:
		return Legacy, legacy, nil, "the only one that works here", nil
	}
	counted := fmt.Sprintf("of rules of others, legacy has %d and nft %d", legacy.others, nft.others)
	switch {
	case nft.kubelet && !legacy.kubelet:
		return NFT, nft, &legacy, "it holds a chain of kubelet's", nil
	case legacy.kubelet && !nft.kubelet:
		return Legacy, legacy, &nft, "it holds a chain of kubelet's", nil
	case legacy.others > nft.others:
		return Legacy, legacy, &nft, counted, nil
	case nft.others > legacy.others:
		return NFT, nft, &legacy, counted, nil
	case legacy.own && !nft.own:
		return Legacy, legacy, &nft, "an earlier run used it", nil
	}
	return NFT, nft, &legacy, counted + "; nft copies no table for a change and has no lock", nil
}
