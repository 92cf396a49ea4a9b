package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
)

// Capacity is what one restore writes without delaying other changes for more than some seconds: a
// source range and an endpoint are a rule each, and 32,768 rules take a second. With affinity, an
// endpoint is also a list of xt_recent: for each rule that names one the kernel looks through all of
// them, and iptables-legacy commits all rules at each change.
var Capacity = intent.Capacity{Frontends: 1 << 18, Endpoints: 1 << 18, Slots: 1 << 19, SourceRanges: 1 << 16, AffinityEndpoints: 1 << 14}

// Variant is one of the two sets of programs called iptables. Each has its own tables in
// the kernel, and does not see the other's.
type Variant string

// The variants.
const (
	Legacy Variant = "legacy" // ip_tables
	NFT    Variant = "nft"    // nf_tables, with the names of the old tables
)

// The values of Config.VerifyPartialSync.
const (
	VerifyOff     = "off"
	VerifySampled = "sampled"
	VerifyAlways  = "always"
)

// VerifyChoices are the values of --verify-partial-sync.
var VerifyChoices = []string{VerifyOff, VerifySampled, VerifyAlways}

// Config configures the dataplane.
type Config struct {
	Log *slog.Logger
	// VerifyPartialSync selects the partial syncs after which the agent compares the
	// kernel's rules with those of a full sync. VerifyOff, the default for "", selects
	// none, VerifyAlways all. VerifySampled selects so many that comparing takes a
	// hundredth of the time at most.
	VerifyPartialSync string
	// BeforeRemoval runs before Cleanup removes the chains, and with them the translation
	// of their connections. An error keeps the chains. Nil: no check.
	BeforeRemoval func(context.Context) error

	lockFile string // "" is iptables' own, /run/xtables.lock
	wait     time.Duration
}

// Validate returns an error that names a missing or wrong field.
func (c *Config) Validate() error {
	if c.Log == nil {
		return errors.New("no logger")
	}
	if c.VerifyPartialSync != "" && !slices.Contains(VerifyChoices, c.VerifyPartialSync) {
		return fmt.Errorf("verify partial syncs %q: not a choice: use %s", c.VerifyPartialSync, strings.Join(VerifyChoices, ", "))
	}
	return nil
}

// lockWait is the time in seconds for which a program waits for the xtables lock. Other
// programs hold it for a second or two at most. The agent retries after that.
func (c *Config) lockWait() int {
	if c.wait == 0 {
		return 5
	}
	return max(1, int(c.wait.Seconds()))
}

func (c *Config) lockPath() string {
	if c.lockFile == "" {
		return "/run/xtables.lock"
	}
	return c.lockFile
}

// lockHolder returns the holder of the xtables lock, " (held by pid 1234, NAME)", or "" if
// it cannot be found.
func (c *Config) lockHolder() string {
	var st unix.Stat_t
	if unix.Stat(c.lockPath(), &st) != nil {
		return ""
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return ""
	}
	// A line is "1: FLOCK ADVISORY WRITE 1234 00:17:5678 0 EOF"; a waiting process has
	// "->".
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for line := range strings.Lines(string(locks)) {
		f := strings.Fields(line)
		if len(f) < 6 || f[1] != "FLOCK" || f[5] != file {
			continue
		}
		name, _ := os.ReadFile("/proc/" + f[4] + "/comm")
		return strings.TrimSuffix(fmt.Sprintf(" (held by pid %s, %s", f[4], strings.TrimSpace(string(name))), ", ") + ")"
	}
	return ""
}
