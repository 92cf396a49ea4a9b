package main

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// options are the flags of the runner.
type options struct {
	all      bool
	only     string
	packages int
	timeout  time.Duration
}

// plan returns the steps of a run. What is listed first begins first.
func (o options) plan() ([]step, error) {
	tests, err := o.tests()
	if err != nil {
		return nil, err
	}
	switch o.only {
	case "tests":
		return tests, nil
	case "checks":
		return o.checks(), nil
	case "":
		return slices.Concat(o.checks(), tests), nil
	}
	return nil, fmt.Errorf("-only %s: use tests or checks", o.only)
}

// checks are the steps that need no test: installation and lint. Where nothing is cached,
// the peers and the linters take longest to build: they share the CPUs, and the tests, which
// mostly wait, begin when the peers are there.
func (o options) checks() []step {
	groups := []string{"generate", "lint", "test", "browser"}
	peers := []string{"kube-proxy", "kube-apiserver", "kube-controller-manager", "etcd"}
	if o.all {
		groups = append(groups, "test-all", "cluster", "ui", "docs")
		peers = append(peers, "otelcol")
	}
	checks := []step{
		{name: "packages", argv: append([]string{"hack/deps"}, groups...)},
		{name: "peers", after: []string{"packages"}, argv: append([]string{"hack/peers"}, peers...)},
		{name: "lint", after: []string{"packages"}, argv: []string{"make", "--no-print-directory", "lint"}},
		{name: "generated", after: []string{"lint"}, argv: []string{"hack/generated"}},
	}
	if o.all {
		checks = append(checks, step{name: "lint-proto", after: []string{"generated"},
			argv: []string{"make", "--no-print-directory", "lint-proto"}})
	}
	return checks
}

// first lists the packages whose tests take longest, the longest first. They begin first, so
// that the last minutes are not one package on one core.
var first = []string{
	"test/e2e",
	"test/hostile",
	"internal/dataplane/ebpf",
	"test/flows",
	"test/controlplane",
	"test/privilege",
	"internal/dataplane/nftables",
	"internal/dataplane/iptables",
	"test/files",
	"test/scale",
	"internal/node/dnat",
}

// tests are the steps that run tests.
func (o options) tests() ([]step, error) {
	list, err := exec.Command("go", "list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w", err)
	}
	packages := strings.Fields(string(list))
	if o.all { // see hostile
		packages = slices.DeleteFunc(packages, func(p string) bool { return p == module+"test/hostile" })
	}
	slices.SortStableFunc(packages, func(a, b string) int { return rank(a) - rank(b) })
	hack := []string{"./man", "./reference"}
	if o.all {
		hack = []string{"./..."}
	}
	ebpf := []step{o.goTest("ebpf", ".", o.packages, packages...)}
	netfilter := o.dataplanes()
	rest := []step{
		o.goTest("lab", "lab", 1, "./soak", "./..."), // the longest first
		o.goTest("browser", "test/browser", 1, "./..."),
		o.goTest("deploy", "test/deploy", 1, "./..."),
	}
	others := o.goTest("hack", "hack", 1, hack...)
	// Two lanes, and one of hostile: more packages at once only make each of them late.
	if o.all {
		ebpf = append(ebpf, rest...)
		netfilter = append(netfilter, others)
	} else {
		netfilter = append(append(netfilter, rest...), others)
	}
	stages := append(inTurn(ebpf), inTurn(netfilter)...)
	if o.all {
		stages = append(stages, inTurn(o.hostile())...)
		cluster := o.goTest("cluster", "test/cluster", 1, "-short", "./...")
		cluster.after = append(names(stages), "generated", "lint-proto") // it counts losses: nothing runs beside it
		stages = append(stages, cluster)
	}
	return stages, nil
}

// inTurn makes each step begin after the one before.
func inTurn(lane []step) []step {
	for i := range lane[1:] {
		lane[i+1].after = []string{lane[i].name}
	}
	return lane
}

func names(steps []step) []string {
	var list []string
	for _, s := range steps {
		list = append(list, s.name)
	}
	return list
}

// rank is the place of a package in first.
func rank(pkg string) int {
	if i := slices.Index(first, strings.TrimPrefix(pkg, module)); i >= 0 {
		return i
	}
	return len(first)
}

// goTest is a step that tests packages, parallel of them at once. args may end with
// flags of the tests.
func (o options) goTest(name, dir string, parallel int, args ...string) step {
	// A cached result says nothing: the kernel is tested as much as the code. Lint runs vet, and
	// linking takes half the time without what debuggers need.
	timeout := o.timeout
	if o.all {
		timeout *= 3
	}
	argv := []string{"go", "test", "-json", "-count=1", "-vet=off", "-ldflags=-s -w", "-timeout=" + timeout.String(),
		fmt.Sprint("-p=", parallel)}
	if !o.all {
		argv = append(argv, "-short")
	}
	return step{name: name, after: []string{"peers"}, dir: dir, argv: append(argv, args...), tests: true}
}

// netfilter are the other dataplanes, by the name of their step, with the flags of tests.
var netfilter = []struct {
	name  string
	flags []string
	// networks are the flow tests that it runs without -all. Rules of both variants of iptables
	// have one source: each network has one of them, and each case of TestFlows.
	networks string
}{
	{"nftables", []string{"-proxy-mode=nftables"}, "TestFlows(|VXLAN|StrictSources|Flags)"},
	{"iptables-legacy", []string{"-proxy-mode=iptables", "-iptables-variant=legacy"}, "TestFlows(VXLAN|Flags)"},
	{"iptables-nft", []string{"-proxy-mode=iptables", "-iptables-variant=nft"}, "TestFlows(|StrictSources)"},
}

// dataplanes are the steps that test the other dataplanes.
func (o options) dataplanes() []step {
	var steps []step
	for _, d := range netfilter {
		args := []string{"./test/flows"}
		if o.all {
			// FromAPI has all dataplanes in one cluster, and DSR has eBPF alone.
			args = append([]string{"-skip", "TestFlowsFromAPI|TestFlowsDSR"}, args...)
			args = append(args, "./test/files")
		} else {
			args = append([]string{"-run", "^" + d.networks + "$"}, args...)
		}
		steps = append(steps, o.goTest(d.name, ".", 1, append(args, d.flags...)...))
	}
	return steps
}

// hostile are the steps of -all that attack each dataplane, in a lane of their own: they wait more
// than they work. Long floods fill Spillway's own table: the others have the kernel's, and run as -short.
func (o options) hostile() []step {
	steps := []step{o.goTest("hostile-ebpf", ".", 1, "./test/hostile")}
	for _, d := range netfilter {
		steps = append(steps, o.goTest("hostile-"+d.name, ".", 1, append([]string{"-short", "./test/hostile"}, d.flags...)...))
	}
	return steps
}
