// Command e2e runs Kubernetes' own tests of Services against any cluster, and prints what
// they found:
//
//	go run ./cmd/e2e -kubeconfig FILE [-conformance] [-label ebpf] [-dir DIRECTORY]
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"spillway.dev/spillway/test/cluster/e2e"
	"spillway.dev/spillway/test/cluster/programs"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	cfg := e2e.Config{Focus: e2e.All}
	flag.StringVar(&cfg.Kubeconfig, "kubeconfig", "", "`file` with the cluster's address and credentials")
	flag.StringVar(&cfg.Label, "label", "spillway", "`name` of the cluster's proxy in the table and in expected.yaml")
	flag.StringVar(&cfg.CNI, "cni", "", "`name` of the cluster's CNI in expected.yaml")
	flag.StringVar(&cfg.Dir, "dir", "report/e2e", "`directory` of the log and the report")
	flag.IntVar(&cfg.Procs, "procs", 0, "tests at once; 0 is 6")
	flag.IntVar(&cfg.Nodes, "nodes", 0, "nodes of the cluster; 0 is 3")
	flag.StringVar(&cfg.Focus.Match, "focus", cfg.Focus.Match, "regular `expression` of tests to run")
	conformance := flag.Bool("conformance", false, "run the tests that every cluster must pass, and no others")
	flag.Parse()
	if *conformance {
		cfg.Focus = e2e.Conformance
	}
	if cfg.Programs, err = programs.Build(ctx, os.Stderr, e2e.Programs...); err != nil {
		return err
	}
	expected, err := e2e.ExpectedFailures()
	if err != nil {
		return err
	}
	report, err := e2e.Run(ctx, cfg)
	if err != nil {
		return err
	}
	fmt.Print(e2e.Table(report))
	return report.Check(expected)
}
