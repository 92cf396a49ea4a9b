package ebpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/kernel"
)

// Cleanup takes everything of this instance out of the kernel. What is not
// there is no error. Pins of another network namespace are refused while there
// is a way to clean up there, and go when there is none any more.
func Cleanup(cfg Config) error {
	info, err := os.Stat(cfg.BPFFS)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Without pins there are no links. Filters of clsact need none.
		return attach.DetachFilters()
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
	return errors.Join(detach(cfg, abandoned), removePins(cfg.BPFFS))
}

// ownedElsewhere reports whether the pins are of another network namespace. It
// is an error if that can be entered.
func ownedElsewhere(bpffs string) (bool, error) {
	own, err := kernel.CurrentNetns()
	if err != nil {
		return false, fmt.Errorf("find out network namespace: %w", err)
	}
	owner, known, err := ownerOf(bpffs)
	if err != nil || !known || owner.Cookie == own.Cookie {
		return false, err
	}
	if where := kernel.FindNetns(owner); where != "" {
		return false, fmt.Errorf("bpffs %s: belongs to the agent of another network namespace, %s: clean up there: %s",
			bpffs, owner, cleanupThere(bpffs, where))
	}
	return true, nil
}

// detach takes the programs from the hooks of devices.
func detach(cfg Config, abandoned bool) error {
	if abandoned { // the filters of this namespace are another instance's
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
	for _, path := range append(layouts(bpffs), ownerPath(bpffs)) {
		errs = append(errs, os.RemoveAll(path))
	}
	// A mount point stays.
	if err := os.Remove(bpffs); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
