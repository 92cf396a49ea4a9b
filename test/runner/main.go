// Command runner runs every test, with each dataplane, and prints one line for each
// package. A failure does not stop it: it runs all stages, and fails at the end.
//
//	go run ./test/runner [-short] [-p 2] [-timeout 20m]
//
// It also fails when a test skips that allow.txt does not list. A test that cannot run
// on some machine skips. A test that skips everywhere tests nothing, so each skip needs
// a line with a reason.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

const allowFile = "test/runner/allow.txt"

func main() {
	short := flag.Bool("short", false, "leave out what takes long (testing.Short), and the suites files and hostile on other dataplanes than eBPF")
	packages := flag.Int("p", 2, "packages to test at once")
	timeout := flag.Duration("timeout", 20*time.Minute, "timeout of the tests of one package")
	flag.Parse()
	allowed, err := readAllowed(allowFile)
	if err != nil {
		fmt.Fprintf(os.Stderr, "runner: %v\n", err)
		os.Exit(1)
	}
	// A cached result says nothing: the kernel is tested as much as the code.
	flags := []string{"-json", "-count=1", "-timeout=" + timeout.String()}
	if *short {
		flags = append(flags, "-short")
	}
	r := newReport(os.Stdout)
	all := stages(*short)
	all[0].run(r, append(slices.Clip(flags), fmt.Sprint("-p=", *packages)))
	// The others have few packages, which mostly wait: run stages at once instead.
	var others errgroup.Group
	others.SetLimit(2 * *packages)
	for _, s := range all[1:] {
		others.Go(func() error {
			s.run(r, append(slices.Clip(flags), "-p=1"))
			return nil
		})
	}
	_ = others.Wait() // no function returns an error
	if !*short {
		cluster.run(r, append(slices.Clip(flags), "-p=1")) // counts losses: nothing runs beside it
	}
	if !r.finish(allowed) {
		os.Exit(1)
	}
}

// stage is one run of go test.
type stage struct {
	name string
	dir  string   // of the module
	args []string // packages, and flags of their tests
}

// stages returns what to run. The first has every package of the module, with eBPF
// where a test runs agents.
func stages(short bool) []stage {
	// FromAPI has all dataplanes in one cluster, and Direct has eBPF alone.
	repeated := []string{"-skip", "TestFlowsFromAPI|TestFlowsDirect", "./test/flows"}
	if !short {
		repeated = append(repeated, "./test/files", "./test/hostile")
	}
	dataplane := func(name string, flags ...string) stage {
		return stage{name, ".", slices.Concat(repeated, flags)}
	}
	all := []stage{
		{"ebpf", ".", []string{"./..."}},
		dataplane("nftables", "-proxy-mode=nftables"),
		dataplane("iptables-legacy", "-proxy-mode=iptables", "-iptables-variant=legacy"),
		dataplane("iptables-nft", "-proxy-mode=iptables", "-iptables-variant=nft"),
		{"deploy", "test/deploy", []string{"./..."}},
		{"image", "hack/image", []string{"./..."}},
	}
	return all
}

// cluster is the short form of the tests on real clusters.
var cluster = stage{"cluster", "test/cluster", []string{"-short", "./..."}}

// run runs the stage and adds its results to the report.
func (s stage) run(r *report, flags []string) {
	args := slices.Concat([]string{"test"}, flags, s.args)
	r.printf("%s: go %s\n", s.name, strings.Join(args, " "))
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Stderr = s.dir, os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		r.stageFailed(s.name, err)
		return
	}
	failed, err := r.readStage(s.name, out)
	err = errors.Join(err, cmd.Wait())
	if err != nil && !failed { // no package explains it
		r.stageFailed(s.name, err)
	}
}
