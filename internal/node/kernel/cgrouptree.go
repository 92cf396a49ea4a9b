package kernel

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// CgroupTree is the tree of cgroup2 as this process sees it. In a container with the host's
// process ids, it is the host's tree: /proc names cgroups relative to the container's own.
type CgroupTree struct {
	Top string // directory of the topmost visible cgroup; "" if there is none
	own string // path below Top to which /proc/PID/cgroup is relative
}

// FindCgroupTree finds the tree of the first process, or else the own one.
func FindCgroupTree() (c CgroupTree) {
	own := cgroupMount("/proc/self/mountinfo")
	c.Top = own
	const first = "/proc/1/root"
	if theirs := cgroupMount("/proc/1/mountinfo"); theirs != "" {
		if dir := filepath.Join(first, theirs); inode(dir) != 0 {
			c.Top = dir
		}
	}
	if id := inode(own); id != 0 && id != inode(c.Top) {
		if path := c.ByID(id); path != "" {
			c.own = strings.TrimPrefix(path, c.Top)
		} else {
			c.Top = own // another tree
		}
	}
	return c
}

// cgroupMount returns the mount point of cgroup2 in a list of mounts; "" if there is none.
func cgroupMount(mounts string) string {
	text, _ := os.ReadFile(mounts)
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(line, " - ")
		if fields := strings.Fields(before); ok && strings.HasPrefix(after, "cgroup2 ") && len(fields) > 4 {
			return fields[4]
		}
	}
	return ""
}

// inode returns the number of a directory, which is the id of a cgroup; 0 if it cannot be read.
func inode(dir string) uint64 {
	var st unix.Stat_t
	if dir == "" || unix.Stat(dir, &st) != nil {
		return 0
	}
	return st.Ino
}

// Of returns the directory of a process's cgroup; "" if it is not visible.
func (c *CgroupTree) Of(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil || c.Top == "" {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if dir := filepath.Join(c.Top, c.own, path); ok && strings.HasPrefix(dir, c.Top) && inode(dir) != 0 {
			return dir
		}
	}
	return ""
}

// Below reports whether a directory is a cgroup or below it.
func (c *CgroupTree) Below(dir string, id uint64) bool {
	return c.BelowAny(dir, func(at uint64) bool { return at == id })
}

// BelowAny reports whether a directory is one of the cgroups that is selects, or below one.
func (c *CgroupTree) BelowAny(dir string, is func(id uint64) bool) bool {
	for ; strings.HasPrefix(dir, c.Top); dir = filepath.Dir(dir) {
		if is(inode(dir)) {
			return true
		}
		if dir == c.Top {
			break
		}
	}
	return false
}

// ByID finds the directory of a cgroup; "" if it is not visible.
func (c *CgroupTree) ByID(id uint64) (found string) {
	if id == 0 || c.Top == "" {
		return ""
	}
	_ = filepath.WalkDir(c.Top, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // removed meanwhile
		}
		if inode(path) == id {
			found = path
			return fs.SkipAll
		}
		return nil
	})
	return found
}

// minUID is the length of the shortest UID: that of a static Pod is a hash in hexadecimal.
const minUID = 32

// PodUID returns the UID of the Pod whose cgroup has this name. The kubelet names them "podUID", or,
// with systemd, "kubepods-burstable-podUID.slice" with "_" for "-".
func PodUID(cgroup string) (uid string, ok bool) {
	if uid, ok = strings.CutSuffix(cgroup, ".slice"); ok {
		_, uid, ok = strings.Cut(uid, "-pod")
		uid = strings.ReplaceAll(uid, "_", "-")
	} else {
		uid, ok = strings.CutPrefix(cgroup, "pod")
	}
	return uid, ok && len(uid) >= minUID
}
