package trace

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

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
