package kernel

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// noLimit is what memory.limit_in_bytes of cgroup v1 reports without a limit, rounded down: the
// largest multiple of a page that a long has room for.
const noLimit = 1 << 62

// MemoryLimit returns the memory limit of this process in bytes, and the file with it: the
// lowest of its cgroup and the parents that it can see. 0 means that no limit is known. It
// counts the kernel memory of BPF maps, which the process that creates them pays for.
func MemoryLimit() (limit uint64, file string) {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	own, _ := os.ReadFile("/proc/self/cgroup")
	return memoryLimit(mounts, string(own))
}

// memoryLimit reads the limit of a process with these mountinfo and cgroup files of /proc.
func memoryLimit(mounts []byte, own string) (limit uint64, file string) {
	all, _ := mountinfo.GetMountsFromReader(bytes.NewReader(mounts), func(m *mountinfo.Info) (skip, stop bool) {
		return limitFile(m) == "", false
	})
	for line := range strings.Lines(own) {
		_, line, _ = strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(line, ":")
		for _, m := range all {
			isV2 := m.FSType == "cgroup2"
			if isV2 != (controllers == "") || !isV2 && !slices.Contains(strings.Split(controllers, ","), "memory") {
				continue
			}
			below, err := filepath.Rel(m.Root, path)
			if err != nil || !filepath.IsLocal(below) || outside(m.Root) || outside(path) {
				continue
			}
			if l, f := lowestLimit(m.Mountpoint, below, limitFile(m)); limit == 0 || l > 0 && l < limit {
				limit, file = l, f
			}
		}
	}
	return limit, file
}

// outside reports whether a cgroup is outside the cgroup namespace of this process: a mount of the
// node's whole tree begins at /../.. then.
func outside(path string) bool { return strings.HasPrefix(path, "/..") }

// limitFile returns the name of the file with a cgroup's limit; "" for another file system.
func limitFile(m *mountinfo.Info) string {
	switch {
	case m.FSType == "cgroup2":
		return "memory.max"
	case m.FSType == "cgroup" && slices.Contains(strings.Split(m.VFSOptions, ","), "memory"):
		return "memory.limit_in_bytes"
	}
	return ""
}

// lowestLimit returns the lowest limit of the cgroups from a mount point down to a path.
func lowestLimit(mount, below, name string) (limit uint64, file string) {
	dir := mount
	for _, part := range strings.Split(filepath.Join(".", below), "/") {
		dir = filepath.Join(dir, part)
		f := filepath.Join(dir, name)
		text, _ := os.ReadFile(f)
		n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64) // not "max"
		if err == nil && n < noLimit && (limit == 0 || n < limit) {
			limit, file = n, f
		}
	}
	return limit, file
}
