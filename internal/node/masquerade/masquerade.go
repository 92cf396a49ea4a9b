// Package masquerade follows what netfilter's rules do with connections of pods to the outside.
//
//	generation of nf_tables, sizes of legacy tables, polled ──changed──> ruleset.Read ──> Follow's callback
package masquerade

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/nft"
	"spillway.dev/spillway/internal/node/ruleset"
)

const (
	poll = time.Second
	// reread is the longest time between two readings: a rule of legacy iptables may have been replaced
	// by another of the same size.
	reread = time.Minute
	// share bounds the CPU time of readings to 1/share of a core.
	share = 20
)

// Reading is what was read of the rules.
type Reading struct {
	ruleset.Masquerade
	Unclear []string // rules that are not understood, with the reason: lines
	Err     error    // not nil: a part of the rules could not be read, and nothing else is valid
}

// version is what changes with the rules.
type version struct {
	generation uint32
	legacy     [2]kernel.LegacyTableInfo
	external   string // the external devices
}

// Follow calls changed with the rules of the calling thread's network namespace at once, and after each
// change, until ctx is done. It is called in one goroutine. The rules are read at most a second after
// a change, and less often if that would take much CPU time.
func Follow(ctx context.Context, changed func(Reading)) error {
	var conn nft.Conn
	defer conn.Close()
	var last version
	var next, late time.Time
	for {
		now := time.Now()
		v, err := current(ctx, &conn)
		if first := late.IsZero(); first || !now.Before(next) && (err != nil || v != last || now.After(late)) {
			changed(read(ctx, v.external))
			took := time.Since(now)
			last, next, late = v, now.Add(max(poll, share*took)), now.Add(max(reread, share*took))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(poll):
		}
	}
}

func current(ctx context.Context, conn *nft.Conn) (v version, err error) {
	if v.generation, err = conn.Generation(ctx); err != nil {
		v.generation = 0 // a kernel without nf_tables
	}
	for i, v6 := range []bool{false, true} {
		names, err := kernel.LegacyTables(v6)
		if err != nil || !slices.Contains(names, "nat") {
			continue // to ask for a table would create it
		}
		if v.legacy[i], err = (kernel.LegacyTable{Name: "nat", V6: v6}).Info(); err != nil {
			return v, fmt.Errorf("read table nat of legacy iptables: %w", err)
		}
	}
	external, err := devices()
	v.external = external
	return v, err
}

// devices returns the names of the devices of default routes, sorted and separated by slashes.
func devices() (string, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return "", fmt.Errorf("list default routes: %w", err)
	}
	var names []string
	for _, r := range routes {
		if r.Dst != nil && !isDefault(r.Dst) {
			continue
		}
		indexes := []int{r.LinkIndex}
		for _, hop := range r.MultiPath {
			indexes = append(indexes, hop.LinkIndex)
		}
		for _, index := range indexes {
			if link, err := netlink.LinkByIndex(index); err == nil && index != 0 {
				names = append(names, link.Attrs().Name)
			}
		}
	}
	slices.Sort(names)
	return join(slices.Compact(names)), nil
}

func isDefault(dst *net.IPNet) bool {
	ones, _ := dst.Mask.Size()
	return ones == 0
}

// No device has a slash in its name (dev_valid_name).
func join(names []string) string { return strings.Join(names, "/") }

func read(ctx context.Context, external string) Reading {
	rules, errs := ruleset.Read(ctx)
	if len(errs) > 0 {
		return Reading{Err: fmt.Errorf("read netfilter's rules: %w", errors.Join(errs...))}
	}
	m, err := rules.Masquerade(strings.FieldsFunc(external, func(r rune) bool { return r == '/' }))
	if err != nil {
		return Reading{Err: err}
	}
	out := Reading{Masquerade: m}
	for _, u := range m.Unclear {
		out.Unclear = append(out.Unclear, fmt.Sprintf("%s: %s (%s)", u.Rule.Where(), escape.Text(u.Rule.Text), u.Why))
	}
	return out
}
