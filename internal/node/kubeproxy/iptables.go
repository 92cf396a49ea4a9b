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

	"spillway.dev/spillway/internal/node/iptablessave"
)

// ownChains are the chains of kube-proxy's iptables mode, by table, as its own
// --cleanup knows them (pkg/proxy/iptables/cleanup.go, 1.36).
var ownChains = map[string][]string{
	"nat":    {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY"},
	"filter": {"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY"},
	"mangle": {"KUBE-PROXY-CANARY"},
}

// ownPrefixes are the prefixes of its chains per Service, in table nat.
var ownPrefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-FW-", "KUBE-EXT-", "KUBE-SEP-"}

// ownJumps are the chains to which kube-proxy jumps from built-in chains. A rule of a
// built-in chain that jumps to another chain of kube-proxy belongs to another program.
var ownJumps = []string{"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD",
	"KUBE-PROXY-FIREWALL", "KUBE-POSTROUTING"}

func isOwn(table, chain string) bool {
	return slices.Contains(ownChains[table], chain) ||
		table == "nat" && slices.ContainsFunc(ownPrefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
}

// ruleset holds the rules of kube-proxy in one variant and family of iptables.
type ruleset struct {
	program string // "ip6tables-nft"
	tables  []tableRules
}

// tableRules holds the rules of kube-proxy in one table.
type tableRules struct {
	table   string
	chains  []string            // of kube-proxy
	jumps   []string            // rules of built-in chains that jump to them, as "CHAIN RULE"
	targets map[string][]string // chain -> chains of kube-proxy that its rules jump to
}

func (r ruleset) size() (n int) {
	for _, t := range r.tables {
		n += len(t.chains)
	}
	return n
}

// findRulesets reads both variants and families. A variant without its programs counts as
// empty if the kernel has no tables of it.
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
			errs = append(errs, fmt.Errorf("detect rules of kube-proxy: %w", err))
			continue
		}
		tables, err := parseSave(out)
		if err != nil {
			errs = append(errs, fmt.Errorf("detect rules of kube-proxy: %w", err))
			continue
		}
		if r := (ruleset{program, tables}); r.size() > 0 {
			found = append(found, r)
		}
	}
	return found, errors.Join(errs...)
}

// checkWithout returns an error if the kernel has chains of a variant whose program is
// missing. For the legacy variant, the existence of table nat is enough: the kernel does
// not list its chains by name.
func checkWithout(program string) error {
	family, variant, _ := strings.Cut(program, "-")
	exist, err := false, error(nil)
	if variant == "nft" {
		exist, err = nftHolds(family == "ip6tables")
	} else {
		var names []byte
		names, err = os.ReadFile("/proc/thread-self/net/" + strings.Replace(family, "tables", "_tables", 1) + "_names")
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		exist = slices.Contains(strings.Fields(string(names)), "nat")
	}
	if err == nil && exist {
		err = errors.New("not in PATH, but the kernel has its rules: install the package iptables where the agent runs, or run kube-proxy " +
			"--cleanup on this node")
	}
	if err != nil {
		return fmt.Errorf("detect rules of kube-proxy: find %s-save: %w", program, err)
	}
	return nil
}

// parseSave reads the output of a save program.
func parseSave(text string) ([]tableRules, error) {
	var all []tableRules
	for line, err := range iptablessave.Lines(strings.NewReader(text)) {
		if err != nil {
			return nil, err
		}
		if line.Kind == iptablessave.Table {
			all = append(all, tableRules{table: line.Table, targets: map[string][]string{}})
		}
		t := &all[len(all)-1]
		switch {
		case line.Kind == iptablessave.Chain && isOwn(t.table, line.Chain):
			t.chains = append(t.chains, line.Chain)
		case line.Kind == iptablessave.Rule:
			t.addRule(line.Chain, line.Rule)
		}
	}
	return slices.DeleteFunc(all, func(t tableRules) bool { return len(t.chains) == 0 }), nil
}

func (t *tableRules) addRule(from, rule string) {
	words := strings.Fields(rule)
	at := slices.IndexFunc(words, func(w string) bool { return w == "-j" || w == "-g" })
	if at < 0 || at+1 == len(words) {
		return
	}
	// A quoted comment may contain "-j"; the target then comes last.
	if last := len(words) - 2; words[last] == "-j" || words[last] == "-g" {
		at = last
	}
	to := words[at+1]
	switch {
	case !isOwn(t.table, to):
	case iptablessave.IsBuiltin(from) && slices.Contains(ownJumps, to):
		t.jumps = append(t.jumps, from+" "+rule)
	default:
		t.targets[from] = append(t.targets[from], to)
	}
}

// inUse returns the chains that must stay, each with the chain that jumps to it. These
// are the targets of other programs' rules, and the targets of these chains.
func (t *tableRules) inUse() map[string]string {
	inUse := map[string]string{}
	var follow func(from string)
	follow = func(from string) {
		for _, to := range t.targets[from] {
			if _, known := inUse[to]; !known {
				inUse[to] = from
				follow(to)
			}
		}
	}
	for from := range t.targets {
		if !isOwn(t.table, from) {
			follow(from)
		}
	}
	return inUse
}

// remove deletes the chains, each table in one commit.
func (r ruleset) remove(ctx context.Context) error {
	var in strings.Builder
	var errs []error
	for _, t := range r.tables {
		inUse := t.inUse()
		for _, chain := range slices.Sorted(maps.Keys(inUse)) {
			if from := inUse[chain]; !isOwn(t.table, from) {
				errs = append(errs, fmt.Errorf("remove chain %s of table %s: the chain stays, since a rule of chain %s, which is not "+
					"kube-proxy's, jumps to it", chain, t.table, from))
			}
		}
		t.writeRemoval(&in, inUse)
	}
	if _, err := runProgram(ctx, r.program+"-restore", in.String(), "--noflush", "--wait", "5"); err != nil {
		errs = append(errs, fmt.Errorf("remove rules of kube-proxy: %w", err))
	}
	return errors.Join(errs...)
}

// writeRemoval writes the input of a restore program. Declaring a chain empties it, so
// that no chain refers to another when they are deleted.
func (t *tableRules) writeRemoval(in *strings.Builder, inUse map[string]string) {
	unused := slices.DeleteFunc(slices.Clone(t.chains), func(chain string) bool { _, stays := inUse[chain]; return stays })
	fmt.Fprintf(in, "*%s\n", t.table)
	for _, chain := range unused {
		fmt.Fprintf(in, ":%s - [0:0]\n", chain)
	}
	for _, jump := range t.jumps {
		fmt.Fprintf(in, "-D %s\n", jump)
	}
	for _, chain := range unused {
		fmt.Fprintf(in, "-X %s\n", chain)
	}
	in.WriteString("COMMIT\n")
}

// runProgram runs a program of iptables. Its error has the first line of stderr.
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
