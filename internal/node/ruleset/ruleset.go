// Package ruleset reads the netfilter rules of a network namespace with the tools that
// wrote them. These are iptables-save of both variants, and nft for all other tables. It
// answers questions about rules and changes none.
//
//	/proc/net/ip_tables_names ──> iptables-legacy-save ─┐
//	nf_tables' list of tables ─┬> iptables-nft-save ────┼─> Ruleset
//	  (netlink: no program     └> nft list ruleset ─────┘
//	   runs where no table is)
package ruleset

import (
	"fmt"
	"regexp"
	"strings"
)

// Rule is one rule, or one element of a map of nft.
type Rule struct {
	Command string // program that lists and changes it: "iptables-legacy", "ip6tables-nft", "nft", ...
	Family  string // of nft: "ip", "ip6", "inet"; of iptables "ip" or "ip6"
	Table   string
	Chain   string // of an element "@" and the name of its map
	Place   int    // iptables: number in its chain, from 1; nft: handle; 0 for an element
	Text    string // as listed, without chain, number and handle
}

// Chain is one chain.
type Chain struct {
	Command, Family, Table, Name string
	Base                         bool   // packets enter here, from a hook
	Type, Hook                   string // of a base chain of nft: "nat", "postrouting"
	Priority                     int    // of a base chain of nft
	Policy                       string // of a base chain: "ACCEPT", of nft "accept"
	Rules                        []*Rule
}

// Ruleset is the set of rules of one network namespace.
type Ruleset struct {
	Rules  []*Rule // with elements of maps, in the order of the listing
	chains map[chainKey]*Chain
	order  []*Chain
}

type chainKey struct{ command, family, table, name string }

func newRuleset() *Ruleset { return &Ruleset{chains: map[chainKey]*Chain{}} }

func (rs *Ruleset) chain(command, family, table, name string) *Chain {
	k := chainKey{command, family, table, name}
	c := rs.chains[k]
	if c == nil {
		c = &Chain{Command: command, Family: family, Table: table, Name: name}
		rs.chains[k] = c
		rs.order = append(rs.order, c)
	}
	return c
}

func (rs *Ruleset) add(c *Chain, place int, text string) {
	r := &Rule{Command: c.Command, Family: c.Family, Table: c.Table, Chain: c.Name, Place: place, Text: text}
	c.Rules = append(c.Rules, r)
	rs.Rules = append(rs.Rules, r)
}

// Counts returns the number of rules by command. Elements of maps do not count.
func (rs *Ruleset) Counts() map[string]int {
	counts := map[string]int{}
	for _, r := range rs.Rules {
		if !r.Element() {
			counts[r.Command]++
		}
	}
	return counts
}

// Element reports whether the rule is an element of a map.
func (r *Rule) Element() bool { return strings.HasPrefix(r.Chain, "@") }

// Where returns the location of a rule: "iptables-nft nat POSTROUTING 3", "nft ip
// flannel-ipv4 postrtg handle 7".
func (r *Rule) Where() string {
	if r.Command == "nft" {
		return fmt.Sprintf("nft %s %s %s handle %d", r.Family, r.Table, r.Chain, r.Place)
	}
	return fmt.Sprintf("%s %s %s %d", r.Command, r.Table, r.Chain, r.Place)
}

// quoted matches a comment with its option, of iptables and of nft.
var quoted = regexp.MustCompile(`(-m comment --comment|comment) ("(\\.|[^"\\])*"|[^ "]+)`)

// withoutComment returns the text without its comment.
func (r *Rule) withoutComment() string {
	if !strings.Contains(r.Text, "comment") {
		return r.Text
	}
	return quoted.ReplaceAllString(r.Text, "")
}

// words splits a text into names, numbers and addresses.
func words(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return strings.ContainsRune(" \t\n,{}[]\"=", r) })
}

// after returns the word that follows the words before; "" if there is none.
func after(ws []string, before ...string) string {
	for i := 0; i+len(before) < len(ws); i++ {
		match := true
		for j, b := range before {
			match = match && ws[i+j] == b
		}
		if match {
			return ws[i+len(before)]
		}
	}
	return ""
}

// target returns the target of an iptables rule: the word after -j or -g.
func target(ws []string) string {
	if t := after(ws, "-j"); t != "" {
		return t
	}
	return after(ws, "-g")
}
