package dnat

import (
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/nft"
)

// nftRuleTranslates reports whether a rule translates destinations. It is true for a rule that
// cannot be parsed.
func nftRuleTranslates(r nft.ListedRule) bool {
	if r.Table.Family == unix.NFPROTO_UNSPEC {
		return true
	}
	for name, data := range nft.Expressions(r.Expressions) {
		switch name {
		case "redir":
			return true
		case "nat":
			kind := nft.Attribute(data, unix.NFTA_NAT_TYPE)
			if len(kind) < 4 || nft.Number(kind[:4]) == unix.NFT_NAT_DNAT {
				return true
			}
		case "target": // an extension of iptables
			if targetTranslates(nft.String(nft.Attribute(data, unix.NFTA_TARGET_NAME))) {
				return true
			}
		}
	}
	return false
}

// targetTranslates reports whether an iptables target may translate destinations. NETMAP
// in POSTROUTING does not, but the target alone does not show its chain.
func targetTranslates(name string) bool {
	return name == "DNAT" || name == "REDIRECT" || name == "NETMAP"
}
