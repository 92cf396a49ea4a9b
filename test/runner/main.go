// Command runner runs every test, with each dataplane, and prints one line for each
// package. A failure does not stop it: it runs all stages, and fails at the end.
//
//	go run ./test/runner [-short] [-- FLAGS OF GO TEST]
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
)

const allowFile = "test/runner/allow.txt"

func main() {
	short := flag.Bool("short", false, "leave out what takes long (testing.Short), and the hostile and files suites on other dataplanes than eBPF")
	flag.Parse()
	allowed, err := readAllowed(allowFile)
	if err != nil {
		fmt.Fprintf(os.Stderr, "runner: %v\n", err)
		os.Exit(1)
	}
	r := newReport(os.Stdout)
	for _, s := range stages(*short) {
		s.run(r, flag.Args())
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
	repeated := []string{"-skip", "TestFlowsFromAPI", "./test/flows"} // FromAPI has all dataplanes in one cluster
	if !short {
		repeated = append(repeated, "./test/files", "./test/hostile")
	}
	list := []stage{
		{name: "ebpf", dir: ".", args: []string{"./..."}},
		{name: "deploy", dir: "test/deploy", args: []string{"./..."}},
		{name: "nftables", dir: ".", args: append(slices.Clip(repeated), "-proxy-mode=nftables")},
		{name: "iptables-legacy", dir: ".", args: append(slices.Clip(repeated), "-proxy-mode=iptables", "-iptables-variant=legacy")},
		{name: "iptables-nft", dir: ".", args: append(slices.Clip(repeated), "-proxy-mode=iptables", "-iptables-variant=nft")},
	}
	if short {
		for i := range list {
			list[i].args = append([]string{"-short"}, list[i].args...)
		}
	}
	return list
}

// run runs the stage and adds its results to the report.
func (s stage) run(r *report, flags []string) {
	args := slices.Concat([]string{"test", "-json"}, flags, s.args)
	fmt.Fprintf(r.out, "\n%s: go %s\n", s.name, strings.Join(args, " "))
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
	failed := len(r.broken)
	err = r.readStage(s.name, out)
	err = errors.Join(err, cmd.Wait())
	if err != nil && len(r.broken) == failed { // no package explains it
		r.stageFailed(s.name, err)
	}
}
