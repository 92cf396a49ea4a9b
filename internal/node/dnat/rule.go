package dnat

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// nftRuleTranslates reports whether a rule, as the payload of NFT_MSG_NEWRULE, translates
// destinations. It is true for a rule that cannot be parsed.
func nftRuleTranslates(msg []byte) (translates bool) {
	const header = 4 // struct nfgenmsg
	if len(msg) < header {
		return true
	}
	for typ, expressions := range attributes(msg[header:]) {
		if typ != unix.NFTA_RULE_EXPRESSIONS {
			continue
		}
		for _, expression := range attributes(expressions) {
			if expressionTranslates(expression) {
				return true
			}
		}
	}
	return false
}

// expressionTranslates reports whether one NFTA_LIST_ELEM translates destinations.
func expressionTranslates(expression []byte) bool {
	var name string
	var data []byte
	for typ, value := range attributes(expression) {
		switch typ {
		case unix.NFTA_EXPR_NAME:
			name = unix.ByteSliceToString(value)
		case unix.NFTA_EXPR_DATA:
			data = value
		}
	}
	switch name {
	case "redir":
		return true
	case "nat":
		kind, ok := attribute(data, unix.NFTA_NAT_TYPE)
		return !ok || len(kind) < 4 || binary.BigEndian.Uint32(kind) == unix.NFT_NAT_DNAT
	case "target": // an extension of iptables
		target, _ := attribute(data, unix.NFTA_TARGET_NAME)
		return targetTranslates(unix.ByteSliceToString(target))
	}
	return false
}

// targetTranslates reports whether an iptables target may translate destinations. NETMAP
// in POSTROUTING does not, but the target alone does not show its chain.
func targetTranslates(name string) bool {
	return name == "DNAT" || name == "REDIRECT" || name == "NETMAP"
}

func attribute(attrs []byte, want uint16) (value []byte, ok bool) {
	for typ, value := range attributes(attrs) {
		if typ == want {
			return value, true
		}
	}
	return nil, false
}

// attributes iterates over netlink attributes by type and value, up to the first
// truncated one.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			size := int(binary.NativeEndian.Uint16(b))
			if size < unix.SizeofNlAttr || size > len(b) {
				return
			}
			typ := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if !yield(typ, b[unix.SizeofNlAttr:size]) {
				return
			}
			b = b[min(len(b), (size+3)&^3):]
		}
	}
}
