package cluster

import (
	"context"
	"flag"
	"testing"
	"time"
)

// Flags of every test that runs agents.
var (
	proxyMode  = flag.String("proxy-mode", "ebpf", "dataplane to test: ebpf, nftables or iptables")
	variant    = flag.String("iptables-variant", "", "variant of iptables that the nodes use: legacy or nft (default: neither, the dataplane chooses)")
	sourceFlag = flag.String("source", "manifests", "where agents read Services: manifests, or api, a real kube-apiserver")
	binaryFlag = flag.String("binary", "", "spillway to test (default: build it from this tree)")
)

// Start builds a cluster with an agent on each node, of the mode and binary that
// the test's flags ask for, and takes it down when the test is over.
func Start(t *testing.T, cfg Config) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	if *sourceFlag != "manifests" && *sourceFlag != "api" {
		t.Fatalf("-source %q: use manifests or api", *sourceFlag)
	}
	cfg.FromAPI = cfg.FromAPI || *sourceFlag == "api"
	var err error
	cfg.Mode, cfg.IptablesVariant = *proxyMode, *variant
	if cfg.Binary, err = Build(ctx, t.TempDir(), *binaryFlag); err != nil {
		t.Fatal(err)
	}
	c, err := Up(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(); err != nil {
			t.Error(err)
		}
	})
	if cfg.NoAgents {
		return c
	}
	if err := c.StartAgents(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}
