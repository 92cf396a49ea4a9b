package upgrade

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/node/kernel"
)

// Open loads the programs with the maps that an earlier run has pinned, or with new
// ones. A map with another configured size is created again, and the entries that
// programs have written are copied. The migrator is nil if there is nothing to migrate.
func Open(cfg *objects.Config, features kernel.Features) (*objects.Objects, *Migrator, error) {
	all, err := objects.AgentSpecs(cfg, features)
	if err != nil {
		return nil, nil, err
	}
	tc := all[0]
	older, migrated := migrate(all, cfg)
	dir := objects.MapsDir(cfg.BPFFS)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("create directory for pinned maps: %w", err)
	}
	if err := unpinIncompatible(tc, dir, cfg); err != nil {
		return nil, nil, err
	}
	older = append(older, LayoutsSetAside(dir, nil)...)
	made := map[string]bool{}
	for name := range tc.Maps {
		_, err := os.Stat(filepath.Join(dir, name))
		made[name] = migrated || err != nil
	}
	o, err := objects.Load(all, dir, cfg, features)
	if err != nil {
		return nil, nil, err
	}
	m := startMigration(o, older, made, cfg)
	if o.Filter, err = objects.OpenFilter(o); err != nil {
		o.Close()
		return nil, nil, err
	}
	return o, m, nil
}

// startMigration runs the first and longest pass over the maps of earlier runs. Later
// passes run shortly before and after the hooks switch.
func startMigration(o *objects.Objects, older []previousLayout, made map[string]bool, cfg *objects.Config) *Migrator {
	if len(older) == 0 {
		return nil
	}
	m := &Migrator{previous: older, made: made, timeouts: cfg.Timeouts, log: cfg.Log}
	if err := m.Migrate(o.Maps, BeforeSwitch); err != nil {
		cfg.Log.Warn("Running flows are forgotten", "reason", err)
		return nil
	}
	return m
}

// unpinIncompatible unpins maps that do not have the wanted layout. The programs of the
// earlier run keep using theirs until they are replaced. So that these stay consistent
// until then, all maps of Services are replaced together. Maps that programs write and
// that differ only in size are moved aside for the migrator.
func unpinIncompatible(spec *ebpf.CollectionSpec, dir string, cfg *objects.Config) error {
	drop := map[string]bool{}
	var aside []string
	for name, want := range spec.Maps {
		if want.Pinning != ebpf.PinByName {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil { // the pin of a program, or of a link
			cfg.Log.Warn("Pinned map is created again", "map", name, "reason", err)
			drop[name] = true
			continue
		}
		if err := want.Compatible(m); err != nil && replaceable(name) {
			drop[name] = true
		} else if onlySizeDiffers(want, m) && err != nil {
			cfg.Log.Info("Pinned map is created again in another size, and its entries are migrated",
				"map", name, "from", m.MaxEntries(), "to", want.MaxEntries)
			aside = append(aside, name)
		} else if errors.Is(err, ebpf.ErrMapIncompatible) {
			cfg.Log.Warn("Pinned map is created again", "map", name, "reason", err)
			drop[name] = true
		}
		m.Close()
	}
	if slices.ContainsFunc(objects.PortMaps, func(name string) bool { return drop[name] }) {
		for _, name := range objects.PortMaps {
			drop[name] = true
		}
	}
	for name := range drop {
		_ = os.Remove(filepath.Join(dir, name))
	}
	return SetPinsAside(dir, aside)
}

// replaceable reports whether a map may lose its entries: earlier flows end by their
// timeouts, loads and outcomes are counted again, and the rest is of events.
func replaceable(name string) bool {
	switch name {
	case objects.TCMapUnconfirmed, objects.TCMapEvents, objects.TCMapHandshakes, objects.TCMapFlowBytes,
		objects.TCMapLoads, objects.TCMapOutcomes, objects.TCMapSynProofs:
		return true
	}
	return false
}

// SetPinOwner makes this network namespace the owner of the pins. Links cannot move: an agent of
// another namespace with this directory would take live links for dead ones and remove
// them.
func SetPinOwner(bpffs string) error {
	own, err := kernel.CurrentNetns()
	if err != nil {
		return fmt.Errorf("find out network namespace: %w", err)
	}
	owner, known, err := objects.OwnerOf(bpffs)
	if err != nil {
		return err
	}
	switch {
	case known && owner.Cookie == own.Cookie:
		return nil
	case known:
		if where := kernel.FindNetns(owner); where != "" || attach.Attached(bpffs) {
			return fmt.Errorf("bpffs %s: belongs to the agent of another network namespace, %s: give another --bpffs, or uninstall that agent "+
				"first: %s",
				bpffs, owner, cleanupThere(bpffs, where))
		}
	}
	return objects.SetOwner(bpffs, own)
}

// cleanupThere returns the command that cleans up in the namespace at a path.
func cleanupThere(bpffs, where string) string {
	command := "spillway agent --cleanup --bpffs " + bpffs
	if where == "" {
		return command
	}
	return "nsenter --net=" + where + " " + command
}

// RemoveEarlierRanges removes the cluster's prefixes from source_ranges, where programs of earlier
// agents looked for them.
func RemoveEarlierRanges(m *ebpf.Map) error {
	found, err := objects.ReadClusterRanges(m)
	for key := range found {
		err = errors.Join(err, objects.Remove(m, key))
	}
	return err
}
