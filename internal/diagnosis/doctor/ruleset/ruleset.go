// Package ruleset reads the rules that a network namespace has in netfilter, as
// the tools that wrote them list them: iptables-save of both variants, and nft
// for all other tables. It answers questions about rules and changes none.
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
	Command string // that lists and changes it: "iptables-legacy", "ip6tables-nft", "nft", ...
	Family  string // of nft: "ip", "ip6", "inet"; of iptables "ip" or "ip6"
	Table   string
	Chain   string // of an element "@" and the name of its map
	Place   int    // iptables: place in its chain, from 1; nft: handle; 0 for an element
	Text    string // as listed, without what names its place
}

// Chain is one chain.
type Chain struct {
	Command, Family, Table, Name string
	Base                         bool // packets enter here, from a hook
	Rules                        []*Rule
}

// Ruleset are the rules of one network namespace.
type Ruleset struct {
	Rules  []*Rule // elements of maps included, in the order of their listing
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

// Held counts the rules of each command. Elements of maps are none.
func (rs *Ruleset) Held() map[string]int {
	held := map[string]int{}
	for _, r := range rs.Rules {
		if !r.Element() {
			held[r.Command]++
		}
	}
	return held
}

// Element reports whether it is an element of a map.
func (r *Rule) Element() bool { return strings.HasPrefix(r.Chain, "@") }

// Where names the place of a rule: "iptables-nft nat POSTROUTING 3", "nft ip
// flannel-ipv4 postrtg handle 7".
func (r *Rule) Where() string {
	if r.Command == "nft" {
		return fmt.Sprintf("nft %s %s %s handle %d", r.Family, r.Table, r.Chain, r.Place)
	}
	return fmt.Sprintf("%s %s %s %d", r.Command, r.Table, r.Chain, r.Place)
}

// quoted is a comment, with what introduces it, in both languages.
var quoted = regexp.MustCompile(`(-m comment --comment|comment) ("(\\.|[^"\\])*"|[^ "]+)`)

// bare is the text without its comment.
func (r *Rule) bare() string {
	if !strings.Contains(r.Text, "comment") {
		return r.Text
	}
	return quoted.ReplaceAllString(r.Text, "")
}

// words are the text in parts that names, numbers and addresses are.
func words(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return strings.ContainsRune(" \t\n,{}[]\"=", r) })
}

// after is the word behind another one; "" if it is not there.
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

// target is what an iptables rule does: what stands behind -j or -g.
func target(ws []string) string {
	if t := after(ws, "-j"); t != "" {
		return t
	}
	return after(ws, "-g")
}
