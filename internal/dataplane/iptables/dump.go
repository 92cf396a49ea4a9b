package iptables

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// dump is what iptables-save says of one table, as far as it concerns us.
type dump struct {
	table  string
	chains tableSums
	jumps  []jump // into our chains, in their order
	others int    // rules of everybody else
	// kubelet says that the table has a chain that kubelet or iptables-wrappers
	// leave in the variant that the node's other programs use.
	kubelet bool
}

func (d *dump) has(chain string) bool { _, ok := d.chains[chain]; return ok }

func compareStrings(a, b string) int { return cmp.Compare(a, b) }

// readDump reads the output of iptables-save. seen, if not nil, is told every
// rule of ours.
func readDump(out io.Reader, seen func(chain, rule string)) ([]*dump, error) {
	var all []*dump
	var d *dump
	sums := map[string]*summer{}
	lines := bufio.NewScanner(out)
	// Of a line that is longer nothing could be read, and no sync would succeed. A
	// rule of 64 KiB takes no more than a few hundred matches.
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		line := lines.Text()
		if table, ok := strings.CutPrefix(line, "*"); ok {
			d = &dump{table: table, chains: tableSums{}}
			all = append(all, d)
			clear(sums)
			continue
		}
		if d == nil {
			continue
		}
		switch {
		case line == "COMMIT":
			for name, s := range sums {
				d.chains[name] = s.chainSum
			}
			d = nil
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			d.kubelet = d.kubelet || name == "KUBE-IPTABLES-HINT" || name == "KUBE-KUBELET-CANARY"
			if strings.HasPrefix(name, chainPrefix) {
				sums[name] = &summer{}
			}
		case strings.HasPrefix(line, "-A "):
			name, rule, _ := strings.Cut(line[3:], " ")
			if s := sums[name]; s != nil {
				s.add(rule)
				if seen != nil {
					seen(name, rule)
				}
			} else {
				d.foreign(name, rule)
			}
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read iptables-save: %w", err)
	}
	return all, nil
}

// maxLine bounds one line of iptables-save, far above what the kernel takes as a rule.
const maxLine = 1 << 26

// foreign notes a rule in a chain that is not ours. A comment may hold what looks like
// a jump.
func (d *dump) foreign(chain, rule string) {
	if _, target, ok := cutLast(rule, "-j "+chainPrefix); ok && !strings.ContainsAny(target, ` "`) && builtin(chain) {
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

// builtin reports whether a chain is the kernel's own.
func builtin(chain string) bool {
	return slices.Contains([]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}, chain)
}

// editJumps returns the commands that make the jumps into our chains those that
// are wanted. A chain whose jumps are right is left alone.
func (d *dump) editJumps(want []jump) []string {
	var edits []string
	have := byChain(d.jumps)
	wanted := byChain(want)
	for _, from := range []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} {
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

// parseComment reads the Service port back from a rule of a dispatch.
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
