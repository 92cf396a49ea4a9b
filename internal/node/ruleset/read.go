package ruleset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/node/nft"
)

// toolTimeout bounds one listing: iptables-nft-save is slow with very many rules, and a
// program that hangs must not block the others.
const toolTimeout = time.Minute

// Read reads the rules of the calling thread's network namespace. Each part that cannot
// be read is one error of one line; the Ruleset holds the other parts.
func Read(ctx context.Context) (*Ruleset, []error) {
	rs := newRuleset()
	var errs []error
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, family := range []string{"ip", "ip6"} {
		note(rs.readLegacy(ctx, family))
	}
	note(rs.readTables(ctx))
	return rs, errs
}

// readLegacy reads only tables that exist: iptables-legacy-save would create others.
func (rs *Ruleset) readLegacy(ctx context.Context, family string) error {
	names, err := os.ReadFile("/proc/thread-self/net/" + family + "_tables_names")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list tables of legacy iptables: %w", err)
	}
	command := program(family) + "-legacy"
	for _, table := range strings.Fields(string(names)) {
		out, err := list(ctx, []string{command + "-save", program(family) + "-save"}, "(legacy)", "-t", table)
		if err != nil {
			return fmt.Errorf("rules of legacy %s were not read: %w", program(family), err)
		}
		if _, err := rs.parseSave(command, family, out, anyTable); err != nil {
			return fmt.Errorf("rules of legacy %s were not read: %w", program(family), err)
		}
	}
	return nil
}

// program returns the name of the family's program without a variant.
func program(family string) string {
	if family == "ip6" {
		return "ip6tables"
	}
	return "iptables"
}

// standard lists the tables of iptables.
var standard = []string{"raw", "mangle", "nat", "filter", "security"}

// readTables reads the rules of nf_tables: the standard tables with iptables-nft-save,
// as far as it understands them, and the rest with nft.
func (rs *Ruleset) readTables(ctx context.Context) error {
	var conn nft.Conn // most pods have no table, so that no program has to run there
	defer conn.Close()
	present, err := conn.Tables(ctx)
	if err != nil || len(present) == 0 {
		return err
	}
	tables, done := map[string]bool{}, map[string]bool{}
	for _, t := range present {
		tables[t.String()] = true
	}
	var partly []func() // each parses the tables that iptables-nft-save prints in part
	for _, family := range []string{"ip", "ip6"} {
		if !slices.ContainsFunc(standard, func(name string) bool { return tables[family+" "+name] }) {
			continue
		}
		command := program(family) + "-nft"
		// Without this program nft lists these tables, in its own language.
		out, err := list(ctx, []string{command + "-save", program(family) + "-save"}, "(nf_tables)")
		if err != nil {
			continue
		}
		foreign := incompatible(out)
		whole, err := rs.parseSave(command, family, out, func(table string) bool { return !foreign(table) })
		if err != nil {
			return fmt.Errorf("rules of %s were not read: %w", command, err)
		}
		for _, table := range whole {
			done[family+" "+table] = true
		}
		partly = append(partly, func() { _, _ = rs.parseSave(command, family, out, foreign) })
	}
	if !slices.ContainsFunc(slices.Collect(maps.Keys(tables)), func(name string) bool { return !done[name] }) {
		return nil
	}
	out, err := list(ctx, []string{"nft"}, "", "-a", "list", "ruleset")
	if err != nil {
		for _, parse := range partly {
			parse()
		}
		return fmt.Errorf("rules of nftables were not read: %w", err)
	}
	if hidden := rs.parseNFT(out, done); len(hidden) > 0 {
		return fmt.Errorf("rules of nftables were read only in part: extensions of iptables, which nft does not show, in %s",
			strings.Join(hidden, ", "))
	}
	return nil
}

// list runs the first of these programs that is installed. A program whose name has no
// variant counts only if its version names the variant.
func list(ctx context.Context, programs []string, variant string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, toolTimeout, fmt.Errorf("took longer than %v", toolTimeout))
	defer cancel()
	for i, program := range programs {
		path, err := exec.LookPath(program)
		if err != nil {
			continue
		}
		if i > 0 {
			if version, err := exec.CommandContext(ctx, path, "--version").Output(); err != nil || !bytes.Contains(version, []byte(variant)) {
				continue
			}
		}
		var stderr bytes.Buffer
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err == nil {
			// Remarks about tables may be on either stream.
			return append(append(out, '\n'), stderr.Bytes()...), nil
		}
		said, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		return nil, fmt.Errorf("%s: %w: %s", program, err, said)
	}
	return nil, fmt.Errorf("%s is not installed", programs[0])
}
