package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/masquerade"
)

// egressFlags returns the flags of egress.
func (c *Config) egressFlags() []flag {
	return []flag{
		{name: "egress", to: at(&c.Egress, string(egress.Off)), choices: egress.Modes(),
			usage: "Connections of this node's Pods to the outside get the node's address and a source port that no other connection to the " +
				"destination has: off (by netfilter, as the CNI says), auto (what the CNI's rules masquerade) or on (what --egress-config says)."},
		{name: "egress-config", to: at(&c.EgressConfig, ""),
			usage: "File of ip-masq-agent's format with nonMasqueradeCIDRs, for --egress on (default: the ranges of the cluster's Pods keep " +
				"their address). A changed file is read at once."},
		{name: "egress-addresses", to: at(&c.EgressAddresses, nil),
			usage: "Address ranges, separated by commas: these connections get the node's addresses in them, one for all connections of a Pod " +
				"(default: the address of the device by which a packet leaves)."},
	}
}

// validateEgress checks the flags of egress.
func (c *Config) validateEgress() (err error) {
	if c.EgressConfig != "" && c.Egress != string(egress.On) {
		return cli.UsageErrorf("--egress-config has no meaning with --egress %s: give --egress on, or leave it out", c.Egress)
	}
	if len(c.EgressAddresses) > 0 && c.Egress == string(egress.Off) {
		return cli.UsageErrorf("--egress-addresses has no meaning with --egress off: give --egress auto or on, or leave it out")
	}
	c.egressAddresses, err = parsePrefixes("--egress-addresses", c.EgressAddresses)
	return err
}

// filePoll is the time between two looks at --egress-config.
const filePoll = time.Second

// followEgress tells set what egress depends on, until ctx is done.
func (c *Config) followEgress(ctx context.Context, set func(egress.Mode, egress.Facts)) error {
	mode := egress.Mode(c.Egress)
	if mode == egress.Off {
		<-ctx.Done()
		return nil
	}
	f := &egressFollower{mode: mode, set: set, facts: egress.Facts{Addresses: c.egressAddresses}}
	// Its first call is at once.
	if err := kernel.WatchLastingAddrs(ctx, f.onAddrs); err != nil {
		return err
	}
	var file sync.WaitGroup
	defer file.Wait()
	if c.EgressConfig != "" {
		f.readFile(c.EgressConfig)
		file.Go(func() { f.followFile(ctx, c.EgressConfig) })
	}
	return masquerade.Follow(ctx, f.onRules)
}

// egressFollower puts together what is read of the rules and of the file.
type egressFollower struct {
	mode egress.Mode
	set  func(egress.Mode, egress.Facts)

	mu                sync.Mutex
	facts             egress.Facts
	rulesErr, fileErr error
	text              []byte // of the file, as last read
	haveRules         bool   // or the reason why not
}

func (f *egressFollower) onAddrs(lasting, deprecated []netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.facts.Lasting, f.facts.Deprecated = lasting, deprecated
	if f.haveRules {
		f.report()
	}
}

func (f *egressFollower) onRules(r masquerade.Reading) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.haveRules, f.rulesErr, f.facts.Rules = true, r.Err, nil
	if r.Err == nil {
		f.facts.Rules = rulesOf(r)
	}
	f.report()
}

func rulesOf(r masquerade.Reading) *egress.Rules {
	out := &egress.Rules{Translated: r.Translated.Prefixes(), Unclear: r.Unclear}
	for _, w := range r.Masqueraded {
		out.Masqueraded = append(out.Masqueraded, egress.MasqueradeRange{Sources: w.Sources.Prefixes(), Outside: w.Outside.Prefixes()})
	}
	return out
}

func (f *egressFollower) followFile(ctx context.Context, path string) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(filePoll):
		}
		f.readFile(path)
	}
}

// readFile reads the file. If it is bad, the last good one stays.
func (f *egressFollower) readFile(path string) {
	text, err := os.ReadFile(path)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.text != nil && err == nil && string(text) == string(f.text) {
		return
	}
	before := f.fileErr
	f.text, f.fileErr = text, err
	if err == nil {
		var file *egress.File
		if file, f.fileErr = parseEgressFile(text); f.fileErr == nil {
			f.facts.File = file
		}
	}
	if f.fileErr != nil {
		f.fileErr = fmt.Errorf("reads --egress-config %s: %w", path, f.fileErr)
		if before != nil && before.Error() == f.fileErr.Error() {
			return
		}
	}
	if f.haveRules {
		f.report()
	}
}

// report tells set all. The caller holds mu.
func (f *egressFollower) report() {
	f.facts.Err = ""
	if err := errors.Join(f.rulesErr, f.fileErr); err != nil {
		f.facts.Err = "leaves connections to netfilter, or does what it did before: " + strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	f.set(f.mode, f.facts)
}
