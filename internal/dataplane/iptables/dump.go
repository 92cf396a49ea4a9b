package iptables

import (
	"cmp"
	"io"
	"slices"
	"strconv"
	"strings"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/iptablessave"
)

// dump summarizes one table of iptables-save's output.
type dump struct {
	table  string
	chains tableSums // the agent's chains
	jumps  []jump    // from built-in chains to the agent's, in their order
	others int       // number of other programs' rules
	// kubelet reports a chain that kubelet or iptables-wrappers create in the variant
	// that the node's other programs use.
	kubelet bool
}

func (d *dump) has(chain string) bool { _, ok := d.chains[chain]; return ok }

func compareStrings(a, b string) int { return cmp.Compare(a, b) }

// readDump reads the output of iptables-save. It calls seen, if not nil, for every rule
// of the agent's chains.
func readDump(out io.Reader, seen func(chain, rule string)) ([]*dump, error) {
	var all []*dump
	var d *dump
	sums := map[string]*summer{}
	for line, err := range iptablessave.Lines(out) {
		if err != nil {
			return nil, err
		}
		switch line.Kind {
		case iptablessave.Table:
			d = &dump{table: line.Table, chains: tableSums{}}
			all = append(all, d)
			clear(sums)
		case iptablessave.Chain:
			d.kubelet = d.kubelet || line.Chain == "KUBE-IPTABLES-HINT" || line.Chain == "KUBE-KUBELET-CANARY"
			if strings.HasPrefix(line.Chain, chainPrefix) {
				sums[line.Chain] = &summer{}
			}
		case iptablessave.Rule:
			s := sums[line.Chain]
			if s == nil {
				d.foreign(line.Chain, line.Rule)
				continue
			}
			s.add(line.Rule)
			if seen != nil {
				seen(line.Chain, line.Rule)
			}
		case iptablessave.Commit:
			for name, s := range sums {
				d.chains[name] = s.chainSum
			}
		}
	}
	return all, nil
}

// foreign notes a rule outside the agent's chains. The text of a comment may look like a
// jump.
func (d *dump) foreign(chain, rule string) {
	if _, target, ok := cutLast(rule, "-j "+chainPrefix); ok && !strings.ContainsAny(target, ` "`) && iptablessave.IsBuiltin(chain) {
		d.jumps = append(d.jumps, jump{d.table, chain, rule})
		return
	}
	d.others++
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// editJumps returns the commands that replace the present jumps by want. It leaves out
// built-in chains whose jumps are correct.
func (d *dump) editJumps(want []jump) []string {
	var edits []string
	have := byChain(d.jumps)
	wanted := byChain(want)
	for _, from := range iptablessave.BuiltinChains {
		if slices.Equal(have[from], wanted[from]) {
			continue
		}
		for _, rule := range have[from] {
			edits = append(edits, "-D "+from+" "+rule)
		}
		for _, rule := range slices.Backward(wanted[from]) {
			edits = append(edits, "-I "+from+" "+rule)
		}
	}
	return edits
}

func byChain(list []jump) map[string][]string {
	m := map[string][]string{}
	for _, j := range list {
		m[j.from] = append(m[j.from], j.rule)
	}
	return m
}

// parseComment parses the Service port in the comment of a dispatch rule.
func parseComment(rule string, f model.Family) (intent.PortID, bool) {
	_, text, ok := strings.Cut(rule, ` --comment "`)
	if !ok {
		return intent.PortID{}, false
	}
	text, _, _ = strings.Cut(text, `"`)
	words := strings.Fields(text)
	if len(words) != 3 {
		return intent.PortID{}, false
	}
	id := intent.PortID{Family: f}
	name, port, _ := strings.Cut(words[0], ":")
	number, proto, _ := strings.Cut(words[1], "/")
	id.Service.Namespace, id.Service.Name, ok = strings.Cut(name, "/")
	id.Port = port
	n, err := strconv.ParseUint(number, 10, 16)
	id.Number = uint16(n)
	for _, p := range protocolDigits {
		if p.String() == proto {
			id.Protocol = p
		}
	}
	return id, ok && err == nil && id.Protocol != 0
}
