package objects

import (
	"path/filepath"
	"strconv"
)

// LayoutPrefix precedes an ABI version in the name of a directory of pinned maps.
const LayoutPrefix = "maps-v"

// MapsDir returns the directory of this ABI version's maps.
func MapsDir(bpffs string) string { return LayoutDir(bpffs, ABIVersion) }

// LayoutDir returns the directory of an ABI version's maps.
func LayoutDir(bpffs string, version int) string {
	return filepath.Join(bpffs, LayoutPrefix+strconv.Itoa(version))
}

// Layouts returns the directories of pinned maps, of all ABI versions.
func Layouts(bpffs string) []string {
	dirs, _ := filepath.Glob(filepath.Join(bpffs, LayoutPrefix+"*"))
	return dirs
}
