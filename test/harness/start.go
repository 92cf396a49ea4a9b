// Package harness gives tests a cluster of network namespaces: nodes with agents, pods
// and clients with probes, and Services loaded from manifests. All tests that run agents
// on a cluster use it.
package harness

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
)

// Flags of every test that runs agents.
var (
	proxyMode = flag.String("proxy-mode", "ebpf", "dataplane to test: ebpf, nftables or iptables")
	variant   = flag.String("iptables-variant", "",
		"variant of iptables that the nodes use: legacy or nft (default: neither, the dataplane chooses)")
	sourceFlag = flag.String("source", "manifests", "where agents read Services: manifests, or api, a real kube-apiserver")
	binaryFlag = flag.String("binary", "", "spillway to test (default: build it from this tree)")
)

// Main is the end of every TestMain whose tests start clusters. Up to parallel tests run
// at once unless -parallel is given; 0 is Go's default.
func Main(m *testing.M, parallel int) {
	probe.Main()
	flag.Parse()
	given := parallel == 0
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		_ = flag.Set("test.parallel", strconv.Itoa(parallel)) // the flag exists
	}
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// buildDir holds the agent's program as long as the tests run.
var buildDir string

func run(m *testing.M) (code int, err error) {
	if buildDir, err = os.MkdirTemp("", "spillway-test-"); err != nil {
		return 1, err
	}
	defer os.RemoveAll(buildDir)
	return m.Run(), nil
}

// Binary returns the agent's program. It is built once for the tests of a package.
var Binary = sync.OnceValues(func() (string, error) { return cluster.Build(context.Background(), buildDir, *binaryFlag) })

// suffix is what names of clusters end with: a package may run with several dataplanes
// at once.
func suffix() string {
	if *proxyMode == "ebpf" {
		return ""
	}
	return "-" + (*proxyMode)[:1] + (*variant)[:min(1, len(*variant))]
}

// Harness is a running cluster and what is loaded into it.
type Harness struct {
	*cluster.Cluster
	*suite.Loader
}

// New makes a harness of a cluster.
func New(c *cluster.Cluster) *Harness { return &Harness{c, suite.NewLoader(c)} }

// Start builds a cluster with an agent on each node, of the mode and binary that
// the test's flags ask for, and takes it down when the test is over. Clients route to
// the addresses of Services.
func Start(t *testing.T, cfg cluster.Config) *Harness {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	if *sourceFlag != "manifests" && *sourceFlag != "api" {
		t.Fatalf("-source %q: use manifests or api", *sourceFlag)
	}
	cfg.FromAPI = cfg.FromAPI || *sourceFlag == "api"
	cfg.Mode, cfg.IptablesVariant, cfg.Spec.Name = *proxyMode, *variant, cfg.Spec.Name+suffix()
	var err error
	if cfg.Binary, err = Binary(); err != nil {
		t.Fatal(err)
	}
	h := Up(t, cfg)
	if cfg.NoAgents {
		return h
	}
	if err := h.StartAgents(ctx); err != nil {
		t.Fatal(err)
	}
	return h
}

// Up builds a cluster as it is configured, without starting agents, and takes it down
// when the test is over.
func Up(t *testing.T, cfg cluster.Config) *Harness {
	t.Helper()
	cfg.Routes = flows.ServiceRanges()
	c, err := cluster.Up(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(); err != nil {
			t.Error(err)
		}
	})
	return New(c)
}
