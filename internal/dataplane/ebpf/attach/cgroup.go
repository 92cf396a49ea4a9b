package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// AttachCgroup attaches progs to the cgroup as the programs of this instance, pinned in
// PINDIR/cgroup. It takes over links of an earlier run and replaces their programs in
// place. It replaces links at another cgroup, and detaches attach types that are not in
// progs. Programs of others at the cgroup stay. A failed hook does not stop the rest.
func AttachCgroup(pinDir, cgroup string, progs map[ebpf.AttachType]*ebpf.Program) error {
	id, err := cgroupID(cgroup)
	if err != nil {
		return err
	}
	dir := cgroupPins(pinDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create directory for pinned links: %w", err)
	}
	wanted := make(map[string]bool, len(progs))
	var errs []error
	for _, typ := range slices.Sorted(maps.Keys(progs)) {
		name := cgroupHookName(typ)
		wanted[name] = true
		if err := attachCgroupHook(filepath.Join(dir, name), cgroup, id, typ, progs[typ]); err != nil {
			errs = append(errs, fmt.Errorf("attach %s to cgroup %s: %w", name, cgroup, err))
		}
	}
	return errors.Join(append(errs, unpinCgroup(dir, wanted))...)
}

// DetachCgroup removes the hooks of AttachCgroup. A second call is no error.
func DetachCgroup(pinDir string) error {
	dir := cgroupPins(pinDir)
	if err := unpinCgroup(dir, nil); err != nil {
		return err
	}
	return removeDir(dir)
}

func attachCgroupHook(path, cgroup string, id uint64, typ ebpf.AttachType, prog *ebpf.Program) error {
	if old, err := link.LoadPinnedLink(path, nil); err == nil {
		defer old.Close()
		info, err := old.Info()
		if err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId == id &&
			ebpf.AttachType(info.Cgroup().AttachType) == typ && old.Update(prog) == nil {
			return nil
		}
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: typ, Program: prog})
	if err != nil {
		return err
	}
	// The pin holds the link before the handle is closed.
	defer l.Close()
	return pinOver(l, path)
}

// unpinCgroup removes all pins except the wanted ones, and so their links.
func unpinCgroup(dir string, wanted map[string]bool) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list pinned cgroup links: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if wanted[e.Name()] || e.IsDir() { // a directory is foreign
			continue
		}
		path := filepath.Join(dir, e.Name())
		// A handle of another program must not keep the hook attached.
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			_ = l.Detach()
			l.Close()
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove pinned cgroup link: %w", err))
		}
	}
	return errors.Join(errs...)
}

// cgroupID returns the number by which a link names its cgroup: the inode.
func cgroupID(path string) (uint64, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return 0, fmt.Errorf("open cgroup %s: %w", path, err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.IsDir() {
		return 0, fmt.Errorf("open cgroup %s: not a directory", path)
	}
	return st.Ino, nil
}

func cgroupPins(pinDir string) string { return filepath.Join(pinDir, "cgroup") }

// cgroupHookName returns "connect4" for AttachCGroupInet4Connect and "sendmsg6" for
// AttachCGroupUDP6Sendmsg, as in bpftool.
func cgroupHookName(typ ebpf.AttachType) string {
	name := strings.TrimPrefix(strings.ToLower(typ.String()), "cgroup")
	name = strings.TrimPrefix(strings.TrimPrefix(name, "inet"), "udp")
	if name != "" && (name[0] == '4' || name[0] == '6') {
		return name[1:] + name[:1]
	}
	return name
}

// removeDir removes a directory, but keeps one with foreign objects. The caller reports
// it.
func removeDir(dir string) error {
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return fmt.Errorf("remove directory: %w", err)
	}
	return nil
}
