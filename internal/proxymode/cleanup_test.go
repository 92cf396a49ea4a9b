package proxymode

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// A node, or the image of another release, need not have the programs that put
// rules there.
func TestCleanupWithoutProgramsOfNetfilter(t *testing.T) {
	netnstest.Enter(t)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	c := Config{EBPF: ebpf.Config{BPFFS: t.TempDir() + "/never"}, Log: log}
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
		return Cleanup(t.Context(), c)
	}
	all := os.Getenv("PATH")
	if err := withPath(path); err == nil || strings.Contains(err.Error(), "\n") ||
		!strings.Contains(err.Error(), "install the package iptables") {
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

// What a change of --proxy-mode could not take away is counted and tried again.
func TestAFailedCleanupIsCountedAndTriedAgain(t *testing.T) {
	var background sync.WaitGroup
	attempts, failed := 0, 0
	m := proxyMode{name: "nftables", cleanup: func(context.Context, Config) error {
		if attempts++; attempts < 4 {
			return errors.New("device or resource busy")
		}
		return nil
	}}
	m.retire(t.Context(), Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil))}, Retirement{
		Later: background.Go, Pause: time.Millisecond,
		Failed: func(dataplane string) {
			if failed++; dataplane != "nftables" {
				t.Errorf("counted for %q", dataplane)
			}
		},
	})
	background.Wait()
	if attempts != 4 || failed != 3 {
		t.Errorf("%d attempts, %d counted as failed, want 4 and 3", attempts, failed)
	}
	ctx, cancel := context.WithCancel(t.Context())
	attempts = -1000
	m.retire(ctx, Config{Log: slog.New(slog.NewTextHandler(io.Discard, nil))}, Retirement{
		Later: background.Go, Pause: time.Hour, Failed: func(string) {},
	})
	cancel()
	background.Wait() // the agent ends although it still wants to clean up
}
