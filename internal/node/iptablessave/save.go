// Package iptablessave reads the output of iptables-save and its variants (ip6tables-save,
// iptables-nft-save, ...). It runs no program and interprets no rule.
package iptablessave

import (
	"bufio"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
)

// maxLine bounds one line of iptables-save in bytes. Rules with a few hundred matches reach
// 64 KiB; 64 MiB is far above any rule that the kernel accepts.
const maxLine = 1 << 26

// Kind classifies the lines of iptables-save.
type Kind uint8

// The kinds of line. Other lines, such as comments, are not reported.
const (
	Table  Kind = iota // "*nat": the start of a table
	Chain              // ":KUBE-SERVICES - [0:0]": the declaration of a chain
	Rule               // "-A KUBE-SERVICES -j RETURN"
	Commit             // "COMMIT": the end of a table
)

// Line is one line of iptables-save.
type Line struct {
	Kind   Kind
	Table  string // name of the table of the line
	Chain  string // of a Chain and a Rule
	Policy string // of a Chain: "ACCEPT", "DROP"; "-" for a user-defined chain; "" if absent
	Rule   string // of a Rule: the text after "-A CHAIN "
}

// Lines yields the lines of iptables-save's output in their order. It ignores lines
// outside a table. A read error, such as a line of more than 64 MiB, is the last
// element.
func Lines(out io.Reader) iter.Seq2[Line, error] {
	return func(yield func(Line, error) bool) {
		table, inTable := "", false
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, maxLine)
		for lines.Scan() {
			text := lines.Text()
			if name, ok := strings.CutPrefix(text, "*"); ok {
				table, inTable = name, true
			}
			line, ok := parse(table, text)
			if !inTable || !ok {
				continue
			}
			inTable = line.Kind != Commit
			if !yield(line, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Line{}, fmt.Errorf("read iptables-save: %w", err))
		}
	}
}

// parse parses one line. ok is false for a line of no Kind.
func parse(table, text string) (line Line, ok bool) {
	line.Table = table
	switch {
	case strings.HasPrefix(text, "*"):
		line.Kind = Table
	case text == "COMMIT":
		line.Kind = Commit
	case strings.HasPrefix(text, ":"):
		var rest string
		line.Kind = Chain
		line.Chain, rest, _ = strings.Cut(text[1:], " ")
		line.Policy, _, _ = strings.Cut(rest, " ")
	case strings.HasPrefix(text, "-A "):
		line.Kind = Rule
		line.Chain, line.Rule, _ = strings.Cut(text[3:], " ")
	default:
		return line, false
	}
	return line, true
}

// BuiltinChains lists the chains that the kernel calls from its hooks.
var BuiltinChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// IsBuiltin reports whether the kernel calls the chain from a hook.
func IsBuiltin(chain string) bool { return slices.Contains(BuiltinChains, chain) }
