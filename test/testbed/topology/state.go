package topology

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// stateRoot contains a directory for each cluster.
const stateRoot = "/run/spillway-lab"

// The values of Cluster.Status.
const (
	StatusCreating = "creating" // Up is active, or died
	StatusUp       = "up"
	StatusRemoving = "removing" // Down is active, or died
)

// ErrNoCluster is Load's error for a missing cluster.
var ErrNoCluster = errors.New("no such cluster")

// state is the content of state.json.
type state struct {
	Version    int       `json:"version"`
	Status     string    `json:"status"`
	Spec       Spec      `json:"spec"`
	CgroupRoot string    `json:"cgroupRoot"`
	Created    time.Time `json:"created"`
	Hosts      []*Host   `json:"hosts"` // for readers; the spec is what counts
}

const stateVersion = 1

func stateDir(name string) string  { return filepath.Join(stateRoot, name) }
func stateFile(name string) string { return filepath.Join(stateDir(name), "state.json") }
func tempDir(name string) string   { return filepath.Join(stateDir(name), "tmp") }

// writeState writes the state of a cluster whole or not at all.
func (c *Cluster) writeState(status string) error {
	if c.Created.IsZero() {
		c.Created = time.Now().UTC().Truncate(time.Second)
	}
	s := state{stateVersion, status, c.Spec, c.cgroupRoot, c.Created, c.Hosts()}
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	if err := os.MkdirAll(tempDir(c.Spec.Name), 0o755); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	file := stateFile(c.Spec.Name)
	if err := os.WriteFile(file+".new", append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	c.Status = status
	return nil
}

// Load finds a cluster that this or another process created. Its Status tells whether it
// is complete. The error is ErrNoCluster for a missing cluster.
func Load(name string) (*Cluster, error) {
	if err := validName(name); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(stateFile(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("load lab cluster %q: %w: \"spillway-lab lab status\" lists what there is", name, ErrNoCluster)
	}
	if err != nil {
		return nil, fmt.Errorf("load lab cluster %q: %w", name, err)
	}
	var s state
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, fmt.Errorf("load lab cluster %q: read %s: %w: run \"spillway-lab lab down --name %s\"", name, stateFile(name), err, name)
	}
	if s.Version != stateVersion {
		return nil, fmt.Errorf("load lab cluster %q: its state has version %d, not %d: run \"spillway-lab lab down --name %s\"",
			name, s.Version, stateVersion, name)
	}
	c := newCluster(s.Spec, s.CgroupRoot)
	c.Status, c.Created = s.Status, s.Created
	return c, nil
}

// List names the clusters of this machine, including partial ones.
func List() ([]string, error) {
	var names []string
	dirs := []string{stateRoot}
	if mount, err := cgroupMount(); err == nil {
		dirs = append(dirs, filepath.Join(mount, cgroupParent))
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("list lab clusters: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && validName(e.Name()) == nil {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// makeDir creates a directory and its parents. Down of the last cluster removes the
// common parent, possibly at the same time.
func makeDir(path string) (err error) {
	for range 100 {
		// ErrExist: the parent was deleted after Mkdir had found it.
		if err = os.MkdirAll(path, 0o755); !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) {
			break
		}
	}
	return err
}

// lock prevents other processes from changing a cluster until the returned function is
// called. It locks the state directory itself, so it leaves no file. It creates a
// directory again that disappeared meanwhile.
func lock(ctx context.Context, name string) (unlock func(), err error) {
	for {
		if err := makeDir(stateDir(name)); err != nil {
			return nil, fmt.Errorf("lock cluster: %w", err)
		}
		dir, err := os.Open(stateDir(name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("lock cluster: %w", err)
		}
		err = unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && sameDir(dir, stateDir(name)) {
			return func() { dir.Close() }, nil
		}
		dir.Close()
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock cluster: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("lock cluster %q, which another process is changing: %w", name, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func sameDir(open *os.File, path string) bool {
	a, err := open.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}
