package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"strings"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// dispatch maps a destination to the chain that serves it. A key of its tree has digits
// of two bits: the address (none for NodePorts), one digit for the protocol, and 8 for
// the port.
type dispatch struct {
	trie
	root       string // the chain that leads to the top of the tree
	addrDigits int    // 0 for NodePorts, 16 for IPv4, 64 for IPv6
}

// protocolDigits lists the protocols by digit.
var protocolDigits = []model.Protocol{model.TCP, model.UDP, model.SCTP}

// dispatchKey is the key of a frontend.
func dispatchKey(f *intent.Frontend, p model.Protocol) string {
	var digits []byte
	add := func(b byte) {
		digits = append(digits, '0'+b>>6, '0'+b>>4&3, '0'+b>>2&3, '0'+b&3)
	}
	if f.Kind != intent.NodePort {
		for _, b := range f.Addr.AsSlice() {
			add(b)
		}
	}
	for i, known := range protocolDigits {
		if known == p {
			digits = append(digits, '0'+byte(i))
		}
	}
	add(byte(f.Port >> 8))
	add(byte(f.Port))
	return string(digits)
}

// match is the part of a rule that restricts packets to keys with the given prefix. It
// has the words and the order of iptables-save.
func (d *dispatch) match(prefix, comment string) string {
	var m rule
	if n := min(len(prefix), d.addrDigits); n > 0 {
		m.add("-d", d.addresses(prefix[:n]).String())
	}
	if len(prefix) <= d.addrDigits {
		return m.String()
	}
	proto := protocolDigits[prefix[d.addrDigits]-'0']
	m.add("-p", protocolName(proto))
	if comment != "" {
		m.add("-m comment --comment", `"`+comment+`"`)
	}
	if first, last, any := ports(prefix[d.addrDigits+1:]); !any {
		m.add("-m", protocolName(proto), "--dport", portRange(first, last))
	}
	return m.String()
}

// addresses returns the range of addresses whose digits begin with the prefix.
func (d *dispatch) addresses(digits string) netip.Prefix {
	b := make([]byte, d.addrDigits/4)
	for i := range digits {
		b[i/4] |= (digits[i] - '0') << (6 - 2*(i%4))
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(a, 2*len(digits))
}

// ports returns the range of ports whose digits begin with the prefix, and whether it
// contains all ports.
func ports(digits string) (first, last uint16, any bool) {
	for i := range digits {
		first |= uint16(digits[i]-'0') << (14 - 2*i)
	}
	return first, first | uint16(1<<(16-2*len(digits))-1), digits == ""
}

func portRange(first, last uint16) string {
	if first == last {
		return fmt.Sprint(first)
	}
	return fmt.Sprintf("%d:%d", first, last)
}

// chain names the chain of a node: the range that it stands for, if that fits.
func (d *dispatch) chain(prefix string) string {
	name := ""
	switch {
	case prefix == topPrefix:
		return d.root
	case d.addrDigits == 0 && prefix == "":
		name = "PORTS"
	case d.addrDigits == 0:
		first, last, _ := ports(prefix[1:])
		name = fmt.Sprintf("%s-%d-%d", protocolDigits[prefix[0]-'0'], first, last)
	case len(prefix) <= d.addrDigits:
		name = d.addresses(prefix).String()
	}
	if name == "" || len(chainPrefix)+len(name) > maxChainName {
		name = "TO-" + hash(d.match(prefix, ""))
	}
	return chainPrefix + name
}

// rules returns the rules of a node's chain. It returns false if the node does not exist.
// The root chain always exists.
func (d *dispatch) rules(prefix string) ([]string, bool) {
	if prefix == topPrefix {
		if d.top == nil {
			return nil, true
		}
		return []string{d.jump(d.top)}, true
	}
	n := d.find(prefix)
	if n == nil {
		return nil, false
	}
	return d.rulesOf(n), true
}

func (d *dispatch) rulesOf(n *trieNode) []string {
	out := make([]string, 0, max(len(n.entries), len(n.children)))
	for i := range n.entries {
		out = append(out, n.entries[i].rule)
	}
	for _, child := range n.children {
		if child != nil {
			out = append(out, d.jump(child))
		}
	}
	return out
}

func (d *dispatch) jump(n *trieNode) string {
	return newRule(d.match(n.prefix, "")).jump(d.chain(n.prefix))
}

// hash returns 80 bits of a hash, as 16 characters, for a name that does not fit.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

func protocolName(p model.Protocol) string { return strings.ToLower(p.String()) }
