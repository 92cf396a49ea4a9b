package trace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// cgroups is the tree of cgroup2 as this process sees it. In a container with the host's
// process ids, it is the host's tree: /proc names cgroups relative to the container's own.
type cgroups struct {
	top string // directory of the topmost visible cgroup; "" if there is none
	own string // path below top to which /proc/PID/cgroup is relative
}

// findCgroups finds the tree of the first process, or else the own one.
func findCgroups() (c cgroups) {
	own := cgroupMount("/proc/self/mountinfo")
	c.top = own
	const first = "/proc/1/root"
	if theirs := cgroupMount("/proc/1/mountinfo"); theirs != "" {
		if dir := filepath.Join(first, theirs); inode(dir) != 0 {
			c.top = dir
		}
	}
	if id := inode(own); id != 0 && id != inode(c.top) {
		if path := c.byID(id); path != "" {
			c.own = strings.TrimPrefix(path, c.top)
		} else {
			c.top = own // another tree
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

// inode is the number of a directory, which is the id of a cgroup; 0 if it cannot be read.
func inode(dir string) uint64 {
	var st unix.Stat_t
	if dir == "" || unix.Stat(dir, &st) != nil {
		return 0
	}
	return st.Ino
}

// of returns the directory of a process's cgroup; "" if it is not visible.
func (c *cgroups) of(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil || c.top == "" {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if dir := filepath.Join(c.top, c.own, path); ok && strings.HasPrefix(dir, c.top) && inode(dir) != 0 {
			return dir
		}
	}
	return ""
}

// below reports whether a directory is a cgroup or below it.
func (c *cgroups) below(dir string, id uint64) bool {
	return c.belowAny(dir, func(at uint64) bool { return at == id })
}

// belowAny reports whether a directory is one of the cgroups that is selects, or below one.
func (c *cgroups) belowAny(dir string, is func(id uint64) bool) bool {
	for ; strings.HasPrefix(dir, c.top); dir = filepath.Dir(dir) {
		if is(inode(dir)) {
			return true
		}
		if dir == c.top {
			break
		}
	}
	return false
}

// byID finds the directory of a cgroup; "" if it is not visible.
func (c *cgroups) byID(id uint64) (found string) {
	if id == 0 || c.top == "" {
		return ""
	}
	_ = filepath.WalkDir(c.top, func(path string, d fs.DirEntry, err error) error {
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

// newCgroup makes an empty cgroup below another.
func newCgroup(parent string) (string, error) {
	if parent == "" {
		return "", errors.New("make a cgroup: no cgroup2 is visible here")
	}
	dir := filepath.Join(parent, fmt.Sprintf("spillway-trace-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return "", fmt.Errorf("make a cgroup: %w", err)
	}
	return dir, nil
}
