package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// DefaultBPFFS is the usual mount point of the BPF file system.
const DefaultBPFFS = "/sys/fs/bpf"

// mountSource is the source of BPF file systems that EnsureBPFFS mounts, as findmnt shows
// it; usually it is "bpf" or "none". It is part of the mount, so it never describes
// another mount. Kernels before 5.17 may report "none" instead; the mount then stays.
const mountSource = "spillway"

// OnBPFFS reports whether path is inside a BPF file system. A path that does
// not exist is not.
func OnBPFFS(path string) (bool, error) { return onFS(path, unix.BPF_FS_MAGIC) }

// onCgroup2 reports whether path is inside a cgroup2 hierarchy. A path that
// does not exist is not.
func onCgroup2(path string) (bool, error) { return onFS(path, unix.CGROUP2_SUPER_MAGIC) }

func onFS(path string, magic int64) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read file system of %s: %w", path, err)
	}
	return int64(st.Type) == magic, nil
}

// EnsureBPFFS makes path a directory inside a BPF file system. It creates missing
// directories, and mounts a BPF file system if there is none. It mounts it at /sys/fs/bpf
// for paths below it, else at path itself, which must be empty or missing. The mount
// never hides existing files.
func EnsureBPFFS(path string) error {
	path = filepath.Clean(path)
	if on, err := existingOnBPFFS(path); err != nil {
		return err
	} else if !on {
		if err := mountBPFFS(path); err != nil {
			return err
		}
	}
	err := os.MkdirAll(path, 0o700)
	var st unix.Statfs_t
	if errors.Is(err, unix.EROFS) || err == nil && unix.Statfs(path, &st) == nil && st.Flags&unix.MS_RDONLY != 0 {
		return fmt.Errorf("use BPF file system at %s: %w: mount it writable on the node: mount -o remount,rw %s", path, unix.EROFS, DefaultBPFFS)
	}
	if err != nil {
		return fmt.Errorf("make directory in the BPF file system: %w", err)
	}
	return nil
}

// existingOnBPFFS reports whether path, or its longest existing part, is on a BPF file
// system.
func existingOnBPFFS(path string) (bool, error) {
	for {
		_, err := os.Stat(path)
		if err == nil {
			return OnBPFFS(path)
		}
		if !errors.Is(err, fs.ErrNotExist) || path == filepath.Dir(path) {
			return false, fmt.Errorf("find BPF file system: %w", err)
		}
		path = filepath.Dir(path)
	}
}

func mountBPFFS(path string) error {
	target := path
	if rel, err := filepath.Rel(DefaultBPFFS, path); err == nil && filepath.IsLocal(rel) {
		target = DefaultBPFFS
	} else if err := os.MkdirAll(target, 0o755); err != nil {
		return fmt.Errorf("make mount point for the BPF file system: %w", err)
	}
	entries, err := os.ReadDir(target)
	if err != nil {
		return fmt.Errorf("mount BPF file system: %w", err)
	}
	if len(entries) > 0 {
		return fmt.Errorf("mount BPF file system at %s: the directory is not empty; use an empty directory, or one inside a bpffs", target)
	}
	if target == DefaultBPFFS && isSlaveMount(target) {
		return fmt.Errorf("mount BPF file system at %s: a mount in this container would end with it: run \"mount -t bpf bpf %s\" on the "+
			"node, or set bpffs.autoMount of the chart", target, target)
	}
	if err := unix.Mount(mountSource, target, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount BPF file system at %s: %w; mount it manually: mount -t bpf bpf %s", target, err, target)
	}
	return nil
}

// isSlaveMount reports whether a mount at path stays in this mount namespace, although the
// directory is the node's: a container has it with the mount propagation HostToContainer.
func isSlaveMount(path string) bool {
	m, err := mountOf(path)
	return err == nil && strings.Contains(m.Optional, "master:") && !strings.Contains(m.Optional, "shared:")
}

// ReleaseBPFFS unmounts the BPF file system of path, which may have been removed, if
// EnsureBPFFS mounted it and it has no pins. A file system that another program mounted
// stays, and so does one in use: neither is an error. If the mount point is path itself,
// ReleaseBPFFS removes it too.
func ReleaseBPFFS(path string) error {
	path = filepath.Clean(path)
	m, err := mountOf(path)
	if err != nil {
		return fmt.Errorf("find BPF file system to unmount: %w", err)
	}
	if m.FSType != "bpf" || m.Source != mountSource || m.Root != "/" {
		return nil
	}
	if path == DefaultBPFFS {
		return nil // the usual mount point stays
	}
	entries, err := os.ReadDir(m.Mountpoint)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	for _, e := range entries {
		if !IsPreload(e.Name()) {
			return nil // pinned by another instance or another program
		}
	}
	err = unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EINVAL): // in use; unmounted meanwhile
		return nil
	case err != nil:
		return fmt.Errorf("unmount BPF file system %s: %w", m.Mountpoint, err)
	}
	if m.Mountpoint == path {
		_ = os.Remove(m.Mountpoint)
	}
	return nil
}

// IsPreload reports whether the kernel itself creates a pin of this name at the top of
// every BPF file system (kernel/bpf/preload, Linux 5.10).
func IsPreload(name string) bool { return name == "maps.debug" || name == "progs.debug" }

// IsOwnBPFFS reports whether path is the mount point of a BPF file system that
// EnsureBPFFS mounted for path alone.
func IsOwnBPFFS(path string) bool {
	path = filepath.Clean(path)
	m, err := mountOf(path)
	return err == nil && path != DefaultBPFFS && m.FSType == "bpf" && m.Source == mountSource && m.Mountpoint == path
}

// mountOf finds the mount of path, or of its longest existing part.
func mountOf(path string) (*mountinfo.Info, error) {
	for {
		real, err := filepath.EvalSymlinks(path)
		if err == nil {
			path = real
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || path == filepath.Dir(path) {
			return nil, err
		}
		path = filepath.Dir(path)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(path))
	found := &mountinfo.Info{}
	for _, m := range mounts {
		// Of two mounts at one mount point, the later one covers the other.
		if len(m.Mountpoint) >= len(found.Mountpoint) {
			found = m
		}
	}
	return found, err
}

// Cgroup2Mount finds the mount point of cgroup2: /sys/fs/cgroup, or
// /sys/fs/cgroup/unified beside cgroup v1.
func Cgroup2Mount() (string, error) {
	for _, path := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if on, err := onCgroup2(path); err == nil && on {
			return path, nil
		}
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		found := m.FSType == "cgroup2"
		return !found, found
	})
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	if len(mounts) == 0 {
		return "", errors.New("cgroup2 is not mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
	}
	return mounts[0].Mountpoint, nil
}
