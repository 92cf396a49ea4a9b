package main

import (
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/intent"
	"spillway.dev/spillway/internal/kernel/netnstest"
)

// A node, or the image of another release, need not have the programs that put
// rules there.
func TestCleanupWithoutProgramsOfNetfilter(t *testing.T) {
	netnstest.Enter(t)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	c := agentConfig{BPFFS: t.TempDir() + "/never"}
	nft, err := exec.LookPath("nft")
	if err != nil {
		t.Fatal(err)
	}
	b, err := nftables.New(t.Context(), nftables.Config{Log: log})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Replace(t.Context(), intent.State{}); err != nil {
		t.Fatal(err)
	}
	tables := func() string {
		out, err := exec.Command(nft, "list", "tables").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if !strings.Contains(tables(), "spillway") {
		t.Fatal("there is no table: the test is blind")
	}
	i, err := iptables.New(t.Context(), iptables.Config{Log: log})
	if err != nil {
		t.Fatal(err)
	}
	if err := i.Replace(t.Context(), intent.State{}); err != nil {
		t.Fatal(err)
	}
	path := t.TempDir()
	withPath := func(dir string) error {
		t.Setenv("PATH", dir)
		return cleanBackends(t.Context(), c, log)
	}
	all := os.Getenv("PATH")
	if err := withPath(path); err == nil || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), "install the package iptables") {
		t.Errorf("the error is %v, want one line that says what to install", err)
	}
	if strings.Contains(tables(), "inet spillway") {
		t.Error("the table of nftables is left, for which no program is needed")
	}
	if err := withPath(all); err != nil {
		t.Error(err)
	}
	if err := withPath(path); err != nil {
		t.Errorf("there is nothing to clean up, but: %v", err)
	}
}
