package kubeproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// ownChains are the chains of kube-proxy's iptables mode, by table, as its own
// --cleanup knows them (pkg/proxy/iptables/cleanup.go, 1.36).
var ownChains = map[string][]string{
	"nat":    {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY"},
	"filter": {"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY"},
	"mangle": {"KUBE-PROXY-CANARY"},
}

// ownPrefixes begin the names of its chains for each Service, in table nat.
var ownPrefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-FW-", "KUBE-EXT-", "KUBE-SEP-"}

// ownJumps are the chains that kube-proxy leads to from the built-in ones. A
// rule of a built-in chain that leads to another of its chains is not its own.
var ownJumps = []string{"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL", "KUBE-POSTROUTING"}

var builtin = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

func isOwn(table, chain string) bool {
	return slices.Contains(ownChains[table], chain) ||
		table == "nat" && slices.ContainsFunc(ownPrefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
}

// ruleset is what kube-proxy has in one variant and family of iptables.
type ruleset struct {
	program string // "ip6tables-nft"
	tables  []tableRules
}

// tableRules is what it has in one table.
type tableRules struct {
	table  string
	chains []string            // of kube-proxy
	jumps  []string            // rules of built-in chains into them, as "-A ..."
	leads  map[string][]string // chain -> chains of kube-proxy that its rules lead to
}

func (r ruleset) size() (n int) {
	for _, t := range r.tables {
		n += len(t.chains)
	}
	return n
}

// findRulesets looks into both variants and families. A variant whose programs
// are missing holds nothing, unless the kernel says otherwise.
func findRulesets(ctx context.Context) ([]ruleset, error) {
	var found []ruleset
	var errs []error
	for _, program := range []string{"iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"} {
		save, err := exec.LookPath(program + "-save")
		if err != nil {
			errs = append(errs, checkWithout(program))
			continue
		}
		out, err := runProgram(ctx, save, "")
		if err != nil {
			errs = append(errs, fmt.Errorf("look for rules of kube-proxy: %w", err))
			continue
		}
		if r := (ruleset{program, parseSave(out)}); r.size() > 0 {
			found = append(found, r)
		}
	}
	return found, errors.Join(errs...)
}

// checkWithout asks the kernel for chains that cannot be read for lack of a
// program. The old variant's cannot be asked for by name: its table is enough.
func checkWithout(program string) error {
	family, variant, _ := strings.Cut(program, "-")
	held, err := false, error(nil)
	if variant == "nft" {
		held, err = nftHolds(family == "ip6tables")
	} else {
		var names []byte
		names, err = os.ReadFile("/proc/thread-self/net/" + strings.Replace(family, "tables", "_tables", 1) + "_names")
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		held = slices.Contains(strings.Fields(string(names)), "nat")
	}
	if err == nil && held {
		err = errors.New("not in PATH, and the kernel has rules of it: install the package iptables where the agent runs, or run kube-proxy --cleanup on this node")
	}
	if err != nil {
		return fmt.Errorf("look for rules of kube-proxy: find %s-save: %w", program, err)
	}
	return nil
}

// parseSave reads what a save program prints.
func parseSave(text string) []tableRules {
	var all []tableRules
	var t *tableRules
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			all = append(all, tableRules{table: line[1:], leads: map[string][]string{}})
			t = &all[len(all)-1]
		case t == nil:
		case strings.HasPrefix(line, ":"):
			if name, _, _ := strings.Cut(line[1:], " "); isOwn(t.table, name) {
				t.chains = append(t.chains, name)
			}
		case strings.HasPrefix(line, "-A "):
			t.addRule(line)
		}
	}
	return slices.DeleteFunc(all, func(t tableRules) bool { return len(t.chains) == 0 })
}

func (t *tableRules) addRule(line string) {
	words := strings.Fields(line)
	at := slices.IndexFunc(words, func(w string) bool { return w == "-j" || w == "-g" })
	if len(words) < 2 || at < 0 || at+1 == len(words) {
		return
	}
	// In a quoted comment "-j" may stand for itself; the target comes last then.
	if last := len(words) - 2; words[last] == "-j" || words[last] == "-g" {
		at = last
	}
	from, to := words[1], words[at+1]
	switch {
	case !isOwn(t.table, to):
	case slices.Contains(builtin, from) && slices.Contains(ownJumps, to):
		t.jumps = append(t.jumps, line)
	default:
		t.leads[from] = append(t.leads[from], to)
	}
}

// held returns the chains that have to stay, each with the chain that leads to
// it: those of others' rules, and what is led to from there.
func (t *tableRules) held() map[string]string {
	held := map[string]string{}
	var follow func(from string)
	follow = func(from string) {
		for _, to := range t.leads[from] {
			if _, known := held[to]; !known {
				held[to] = from
				follow(to)
			}
		}
	}
	for from := range t.leads {
		if !isOwn(t.table, from) {
			follow(from)
		}
	}
	return held
}

// remove takes the chains away, each table in one commit.
func (r ruleset) remove(ctx context.Context) error {
	var in strings.Builder
	var errs []error
	for _, t := range r.tables {
		held := t.held()
		for _, chain := range slices.Sorted(maps.Keys(held)) {
			if from := held[chain]; !isOwn(t.table, from) {
				errs = append(errs, fmt.Errorf("remove chain %s of table %s: a rule of chain %s leads to it, which is not kube-proxy's: it stays", chain, t.table, from))
			}
		}
		t.writeRemoval(&in, held)
	}
	if _, err := runProgram(ctx, r.program+"-restore", in.String(), "--noflush", "--wait", "5"); err != nil {
		errs = append(errs, fmt.Errorf("remove rules of kube-proxy: %w", err))
	}
	return errors.Join(errs...)
}

// writeRemoval writes the input of a restore program. A chain that is declared
// is emptied, so that none leads to another when they go.
func (t *tableRules) writeRemoval(in *strings.Builder, held map[string]string) {
	gone := slices.DeleteFunc(slices.Clone(t.chains), func(chain string) bool { _, stays := held[chain]; return stays })
	fmt.Fprintf(in, "*%s\n", t.table)
	for _, chain := range gone {
		fmt.Fprintf(in, ":%s - [0:0]\n", chain)
	}
	for _, jump := range t.jumps {
		fmt.Fprintf(in, "-D%s\n", strings.TrimPrefix(jump, "-A"))
	}
	for _, chain := range gone {
		fmt.Fprintf(in, "-X %s\n", chain)
	}
	in.WriteString("COMMIT\n")
}

// runProgram runs a program of iptables; its error is what it complained of.
func runProgram(ctx context.Context, path, in string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	var out, complaint bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in), &out, &complaint
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if err := cmd.Run(); err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(complaint.String()), "\n")
		return "", fmt.Errorf("run %s: %w: %s", path, err, first)
	}
	return out.String(), nil
}
