package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/node/kernel"
)

// Cleanup removes everything of this instance from the kernel. The last instance also
// unmounts the file system that one of them has mounted. Missing objects are no error.
// Foreign objects among the pins stay, and are an error. Pins of another network
// namespace are refused while that namespace can be entered, and removed otherwise. If
// Services were served, Cleanup first leaves new connections to other proxies, waits
// for cfg.Linger, and then removes the rest.
func Cleanup(cfg objects.Config) error {
	info, err := os.Stat(cfg.BPFFS)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Without pins there are no links. Filters of clsact need no pins.
		return errors.Join(attach.DetachFilters(), kernel.ReleaseBPFFS(cfg.BPFFS))
	case err != nil:
		return fmt.Errorf("look for pins: %w", err)
	case !info.IsDir():
		return fmt.Errorf("look for pins: %s is not a directory: give the --bpffs that the agent had", cfg.BPFFS)
	}
	on, err := kernel.OnBPFFS(cfg.BPFFS)
	if err != nil {
		return err
	}
	if !on {
		return errors.Join(attach.DetachFilters(), fmt.Errorf("look for pins: %s is not in a bpf file system: "+
			"give the --bpffs that the agent had, or mount its file system again", cfg.BPFFS))
	}
	abandoned, err := ownedElsewhere(cfg.BPFFS)
	if err != nil {
		return err
	}
	if !abandoned {
		// A failed drain does not stop the cleanup.
		if drained, _ := Drain(cfg); drained {
			time.Sleep(cfg.Linger)
			if flows, _ := flowsOf(cfg); flows != nil {
				_ = endDatagrams(context.Background(), flows, cfg.Linger/2)
				flows.Close()
			}
		}
	}
	if err := errors.Join(detach(cfg, abandoned), removePins(cfg.BPFFS)); err != nil {
		return err
	}
	return kernel.ReleaseBPFFS(cfg.BPFFS)
}

// ownedElsewhere reports whether the pins belong to another network namespace. It
// returns an error if that namespace can be entered.
func ownedElsewhere(bpffs string) (bool, error) {
	owner, known, err := objects.OwnerOf(bpffs)
	if err != nil || !known {
		return false, err
	}
	own, err := kernel.CurrentNetns()
	if err != nil {
		return false, fmt.Errorf("find out network namespace: %w", err)
	}
	if owner.Cookie == own.Cookie {
		return false, nil
	}
	if where := kernel.FindNetns(owner); where != "" {
		return false, fmt.Errorf("bpffs %s: belongs to the agent of another network namespace, %s: clean up there: %s",
			bpffs, owner, cleanupThere(bpffs, where))
	}
	return true, nil
}

// detach detaches the programs from devices.
func detach(cfg objects.Config, abandoned bool) error {
	if abandoned { // the filters of this namespace belong to another instance
		return attach.Unpin(cfg.BPFFS)
	}
	a, err := attach.New(attach.Config{PinDir: cfg.BPFFS, ForceClsact: cfg.ForceClsact})
	if err != nil {
		return err
	}
	defer a.Close()
	return a.Detach()
}

func removePins(bpffs string) error {
	errs := []error{attach.DetachCgroup(bpffs)}
	for _, dir := range objects.Layouts(bpffs) {
		errs = append(errs, removeMaps(dir))
	}
	errs = append(errs, os.RemoveAll(objects.OwnerPath(bpffs)), os.RemoveAll(filepath.Join(bpffs, objects.SeedPin)))
	// A mount point stays, and so does a directory with foreign objects.
	err := os.Remove(bpffs)
	ours := errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EBUSY) && kernel.IsOwnBPFFS(bpffs)
	leftovers := leftoversIn(bpffs, ours)
	switch {
	case len(leftovers) > 0:
		err = fmt.Errorf("remove %s: it holds what is not Spillway's: %s: move it elsewhere, or delete it (rm -r), and clean up again",
			bpffs, strings.Join(leftovers, ", "))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EBUSY):
		err = nil
	}
	return errors.Join(append(errs, err)...)
}

// removeMaps removes a directory of pinned maps, but keeps foreign objects. Of this ABI
// version it removes only the known map names. No version has directories.
func removeMaps(dir string) error {
	known, err := mapNames()
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read directory of pinned maps: %w", err)
	}
	current := filepath.Base(objects.MapsDir(""))
	ofNow := filepath.Base(dir) == current || strings.HasPrefix(filepath.Base(dir), current+setAsideSuffix)
	for _, e := range entries {
		if e.IsDir() || ofNow && !known[e.Name()] {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("unpin map: %w", err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return fmt.Errorf("remove directory of pinned maps: %w", err)
	}
	return nil
}

// mapNames returns the names of the maps that an agent of this version pins.
func mapNames() (map[string]bool, error) {
	names := map[string]bool{objects.IDsMap: true}
	for _, load := range []func() (*ebpf.CollectionSpec, error){objects.LoadTC, objects.LoadSock} {
		spec, err := load()
		if err != nil {
			return nil, fmt.Errorf("read eBPF object: %w", err)
		}
		for name, m := range spec.Maps {
			if m.Pinning == ebpf.PinByName {
				names[name] = true
			}
		}
	}
	return names, nil
}

// leftoversIn lists what the cleanup has left in the directories of links and maps, and
// with all in the instance's own directory. A directory of another instance, which
// contains maps, does not count.
func leftoversIn(bpffs string, all bool) (found []string) {
	inside := append([]string{filepath.Join(bpffs, "links"), filepath.Join(bpffs, "cgroup"),
		filepath.Join(bpffs, "tailcalls")}, objects.Layouts(bpffs)...)
	dirs := inside
	if all {
		dirs = append(slices.Clone(inside), bpffs)
	}
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			// A directory of ours is still there only because of its content.
			if slices.Contains(inside, path) || dir == bpffs && (len(objects.Layouts(path)) > 0 || kernel.IsPreload(e.Name())) {
				continue
			}
			found = append(found, path)
		}
	}
	return found
}
