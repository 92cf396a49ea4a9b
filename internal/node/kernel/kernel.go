// Package kernel reads the state and the features of the running kernel: feature probes,
// network namespaces, sysctls, the BPF file system, cgroup2, and rtnetlink
// notifications. It knows nothing of Services.
package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Version is a kernel's release number. Later parts of the release string
// ("-generic", "-rc3") are left out.
type Version struct{ Major, Minor, Patch int }

// Floor is the oldest kernel that the eBPF dataplane runs on.
var Floor = Version{5, 15, 0}

// RunningVersion returns the kernel's release.
func RunningVersion() (Version, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return Version{}, fmt.Errorf("read kernel version: %w", err)
	}
	return parseVersion(unix.ByteSliceToString(uts.Release[:]))
}

// parseVersion parses the numbers at the start of a release string. A release with only
// two numbers ("6.6-rc1") has patch 0.
func parseVersion(release string) (Version, error) {
	var v Version
	n, _ := fmt.Sscanf(release, "%d.%d.%d", &v.Major, &v.Minor, &v.Patch)
	if n < 2 {
		return Version{}, fmt.Errorf("parse kernel version %q: want MAJOR.MINOR[.PATCH]", release)
	}
	return v, nil
}

// Less reports whether v is older than w.
func (v Version) Less(w Version) bool {
	if v.Major != w.Major {
		return v.Major < w.Major
	}
	if v.Minor != w.Minor {
		return v.Minor < w.Minor
	}
	return v.Patch < w.Patch
}

// String formats a version as "6.18.44".
func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch) }
