package kernel

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultBPFFS is where the BPF file system is mounted by custom.
const DefaultBPFFS = "/sys/fs/bpf"

// OnBPFFS reports whether path is inside a BPF file system. A path that does
// not exist is not.
func OnBPFFS(path string) (bool, error) { return onFS(path, unix.BPF_FS_MAGIC) }

// OnCgroup2 reports whether path is inside a cgroup2 hierarchy. A path that
// does not exist is not.
func OnCgroup2(path string) (bool, error) { return onFS(path, unix.CGROUP2_SUPER_MAGIC) }

func onFS(path string, magic int64) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at file system of %s: %w", path, err)
	}
	return int64(st.Type) == magic, nil
}

// EnsureBPFFS makes path a directory inside a BPF file system. It makes
// missing directories, and mounts a BPF file system where there is none: at
// /sys/fs/bpf for paths under it, else at path itself, which must be empty or
// missing. Nothing that is there gets hidden by the mount.
func EnsureBPFFS(path string) error {
	path = filepath.Clean(path)
	if on, err := existingOnBPFFS(path); err != nil {
		return err
	} else if !on {
		if err := mountBPFFS(path); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return fmt.Errorf("make directory in the BPF file system: %w", err)
	}
	return nil
}

// existingOnBPFFS looks at path, or at the part of it that exists.
func existingOnBPFFS(path string) (bool, error) {
	for {
		_, err := os.Stat(path)
		if err == nil {
			return OnBPFFS(path)
		}
		if !errors.Is(err, fs.ErrNotExist) || path == filepath.Dir(path) {
			return false, fmt.Errorf("look for a BPF file system: %w", err)
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
		return fmt.Errorf("mount BPF file system at %s: the directory is not empty; give an empty one or one inside a bpffs", target)
	}
	if err := unix.Mount("bpf", target, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount BPF file system at %s: %w; mount it by hand: mount -t bpf bpf %s", target, err, target)
	}
	return nil
}

// Cgroup2Mount finds where cgroup2 is mounted: /sys/fs/cgroup, or
// /sys/fs/cgroup/unified where cgroup v1 is in use beside it.
func Cgroup2Mount() (string, error) {
	for _, path := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if on, err := OnCgroup2(path); err == nil && on {
			return path, nil
		}
	}
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("look for cgroup2: %w", err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if path, ok := cgroup2MountPoint(s.Text()); ok {
			return path, nil
		}
	}
	return "", errors.New("cgroup2 is not mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
}

// cgroup2MountPoint reads a line of mountinfo, as described in proc(5).
func cgroup2MountPoint(line string) (string, bool) {
	mount, source, ok := strings.Cut(line, " - ")
	fields := strings.Fields(mount)
	if !ok || len(fields) < 5 || !strings.HasPrefix(source, "cgroup2 ") {
		return "", false
	}
	return unescapeMount(fields[4]), true
}

// unescapeMount undoes the octal escapes (\040) of mountinfo.
func unescapeMount(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
