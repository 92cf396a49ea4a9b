// Command runner is the gate: it installs what is missing, checks the tree, and runs the
// tests, with each dataplane. It prints one line for each step and package, and at the end
// what took longest.
//
//	go run ./test/runner [-all] [-only tests|checks] [-p N]
//
// A failure does not stop it: it runs all steps, and ends with an error. It also fails when
// a test skips that allow.txt does not list. A test that cannot run on some machine skips.
// A test that skips everywhere tests nothing, so each skip needs a line with a reason.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const allowFile = "test/runner/allow.txt"

func main() {
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "runner: %v\n", err)
		os.Exit(1)
	}
}

func run() error {
	var o options
	flag.BoolVar(&o.all, "all", false, "run everything: the long tests, each suite with each dataplane, real clusters")
	flag.StringVar(&o.only, "only", "", "run a part: tests, without installation and checks, or checks")
	flag.IntVar(&o.packages, "p", 4, "packages that a step tests at once")
	flag.DurationVar(&o.timeout, "timeout", 20*time.Minute, "timeout of the tests of one package; with -all three times as long")
	flag.Parse()
	plan, err := o.plan()
	if err != nil {
		return err
	}
	allowed, err := readAllowed(allowFile)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	began := time.Now()
	r := newReport(os.Stdout)
	watch, end := context.WithCancel(ctx)
	go r.progress(watch, began)
	runSteps(ctx, plan, r)
	end()
	r.printTimes()
	ok := r.finish(allowed)
	fmt.Printf("total: %s; %s of CPU time\n", time.Since(began).Round(time.Second), cpuTime().Round(time.Second))
	if !ok {
		return fmt.Errorf("failed: see above")
	}
	return nil
}

// cpuTime returns the CPU time of all programs that have ended.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
