package iptables

import (
	"fmt"
	"net/netip"
	"strings"
)

// chainPrefix begins the name of every chain of the agent. Other programs do not use it.
const chainPrefix = "SPW-"

// maxChainName is the maximum length of a chain's name (XT_EXTENSION_MAXNAMELEN less the
// final zero).
const maxChainName = 28

// A rule has exactly the words and the order of iptables-save: -s, -d, -p, then the
// matches, then the target. The agent compares it with the kernel's rule as text.
type rule struct{ words []string }

func newRule(match string) *rule {
	r := &rule{}
	if match != "" {
		r.words = append(r.words, match)
	}
	return r
}

func (r *rule) add(words ...string) *rule {
	r.words = append(r.words, words...)
	return r
}

func (r *rule) String() string { return strings.Join(r.words, " ") }

func (r *rule) jump(target string) string {
	return strings.Join(append(r.words, "-j", target), " ")
}

// chain is a chain with its rules, each without "-A NAME".
type chain struct {
	name  string
	rules []string
}

func (c *chain) add(rule string) { c.rules = append(c.rules, rule) }

// from is the match of a source range. iptables-save omits a range of all addresses.
func from(p netip.Prefix) *rule {
	if p.Bits() == 0 {
		return newRule("")
	}
	return newRule("-s " + p.String())
}

// to is the match of a destination range.
func to(p netip.Prefix) *rule {
	if p.Bits() == 0 {
		return newRule("")
	}
	return newRule("-d " + p.String())
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// setMark is the target that sets the bits of mask to value.
func setMark(value, mask uint32) string {
	return fmt.Sprintf("MARK --set-xmark %#x/%#x", value, mask)
}

// ifMark is the match of packets whose bits of mask are value.
func ifMark(value, mask uint32) *rule {
	return newRule(fmt.Sprintf("-m mark --mark %#x/%#x", value, mask))
}

// sharesIn is the match of some of n packets, at random. The kernel keeps the probability
// as a number of 31 bits, which iptables-save prints.
func sharesIn(some, n int) string {
	const whole = 1 << 31
	fixed := (whole*some + n/2) / n
	return fmt.Sprintf("-m statistic --mode random --probability %.11f", float64(fixed)/whole)
}
