// Package nft reads and writes nf_tables over netlink: tables, sets, maps, chains, rules and
// conntrack helpers. It knows nothing of Services.
//
//	Transaction   changes of one table; Conn.Commit makes all or none
//	Rule          expressions of a rule
//	Conn          reads tables, chains, rules and elements; watches a table
//	Follow        notifications of all changes
//
// The package encodes what Spillway writes. Of tables of other programs it decodes names,
// hooks and the attributes of expressions, but no text: nft lists that
// (internal/node/ruleset).
package nft
