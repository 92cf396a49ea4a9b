package ruleset

import (
	"slices"
	"strings"
)

// OutputRedirects returns the rules that redirect connections of local processes to a port of
// this namespace, as those of a mesh's sidecar do: rules that packets reach from a base chain
// of nat whose name is OUTPUT. Programs that write nft use this name too.
func (rs *Ruleset) OutputRedirects() (list []*Rule) {
	if !slices.ContainsFunc(rs.Rules, (*Rule).redirects) {
		return nil
	}
	seen := map[*Chain]bool{nil: true}
	var follow func(*Chain)
	follow = func(c *Chain) {
		if seen[c] {
			return
		}
		seen[c] = true
		for _, r := range c.Rules {
			if r.redirects() {
				list = append(list, r)
			}
			for _, name := range r.jumps(words(r.withoutComment())) {
				follow(rs.chains[chainKey{c.Command, c.Family, c.Table, name}]) // nil for a verdict
			}
		}
	}
	for _, c := range rs.order {
		if c.Base && strings.EqualFold(c.Name, "output") && (c.Command == "nft" || c.Table == "nat") {
			follow(c)
		}
	}
	return list
}

func (r *Rule) redirects() bool {
	ws := words(r.withoutComment())
	if r.Command != "nft" {
		return target(ws) == "REDIRECT"
	}
	return !r.Element() && slices.Contains(ws, "redirect")
}
