// Command matrix runs the tests on real clusters in all their variants, one after the
// other, and ends with a table of the results:
//
//	go -C test/cluster run ./cmd/matrix [-rows EXPRESSION] [-short] [-list]
//
// A failure does not stop it. It exits with 1 if any row failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/programs"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
		code := 1
		if errors.Is(err, errUsage) {
			code = 2
		}
		os.Exit(code)
	}
}

var errUsage = errors.New("wrong usage")

func run(ctx context.Context) error {
	match := flag.String("rows", "", "regular `expression` of rows to run (default all)")
	short := flag.Bool("short", false, "leave out what takes long (testing.Short)")
	list := flag.Bool("list", false, "list the rows and run none")
	flag.Parse()
	expression, err := regexp.Compile(*match)
	if err != nil {
		return fmt.Errorf("%w: -rows: %w", errUsage, err)
	}
	root, err := programs.Root()
	if err != nil {
		return err
	}
	m := &matrix{
		dir: filepath.Join(root, "test", "cluster"), nodes: cluster.Dir(""), logs: filepath.Join(root, "report", "cluster"),
		short: *short, out: os.Stdout,
	}
	all, err := m.rows(ctx)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(r row) bool { return !expression.MatchString(r.name) })
	if len(all) == 0 {
		return fmt.Errorf("%w: -rows: no row matches %q: -list lists them", errUsage, *match)
	}
	if *list {
		for _, r := range all {
			fmt.Printf("%-36s go test %s\n", r.name, strings.Join(r.args, " "))
		}
		return nil
	}
	results := m.run(ctx, all)
	fmt.Print("\n", table(results))
	if err := ctx.Err(); err != nil {
		return err
	}
	if slices.ContainsFunc(results, func(r result) bool { return !r.ok }) {
		return fmt.Errorf("some rows failed: their output is in %s", m.logs)
	}
	return nil
}

// row is one run of go test.
type row struct {
	name string
	args []string // of go test: the package, and flags of its tests
}

// rows returns the whole matrix. A package that it does not name runs once, as it is.
func (m *matrix) rows(ctx context.Context) ([]row, error) {
	const vxlan, hostGW, bridge = "flannel-vxlan", "flannel-host-gw", "bridge"
	var rows []row
	add := func(name, pkg, tests string, flags ...string) {
		rows = append(rows, row{name, append([]string{pkg, "-run", tests, "-args"}, flags...)})
	}
	for _, v := range []struct{ proxy, cni string }{
		{"ebpf", vxlan}, {"ebpf", hostGW}, {"ebpf", bridge}, {"nftables", vxlan}, {"iptables", vxlan},
		{"kube-proxy-iptables", vxlan}, {"kube-proxy-nftables", vxlan},
	} {
		add("e2e "+v.proxy+" "+v.cni, "./e2e", ".", "-proxy", v.proxy, "-cni", v.cni)
	}
	for _, v := range []struct{ mode, cni string }{
		{"ebpf", vxlan}, {"ebpf", hostGW}, {"ebpf", bridge}, {"nftables", vxlan}, {"iptables", vxlan},
	} {
		add("life "+v.mode+" "+v.cni, "./life", "Spillway|Beside", "-proxy-mode", v.mode, "-cni", v.cni)
	}
	for _, v := range []struct{ kubeProxy, mode string }{
		{"iptables", "ebpf"}, {"iptables-legacy", "ebpf"}, {"nftables", "ebpf"},
		{"nftables", "nftables"}, {"iptables", "nftables"}, {"iptables", "iptables"},
	} {
		add("takeover "+v.kubeProxy+" "+v.mode, "./life", "Takeover", "-kube-proxy", v.kubeProxy, "-proxy-mode", v.mode)
	}
	for _, mode := range []string{"ebpf", "nftables", "iptables"} {
		add("faults "+mode, "./faults", ".", "-proxy-mode", mode)
	}
	return m.addOthers(ctx, rows)
}

// addOthers adds a row for each package with tests that no row names.
func (m *matrix) addOthers(ctx context.Context, rows []row) ([]row, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}}{{end}}", "./...")
	cmd.Dir, cmd.Stderr = m.dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	for _, dir := range strings.Fields(string(out)) {
		name, err := filepath.Rel(m.dir, dir)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(rows, func(r row) bool { return r.args[0] == "./"+name }) {
			rows = append(rows, row{name, []string{"./" + name}})
		}
	}
	return rows, nil
}
