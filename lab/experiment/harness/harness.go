// Package harness is what experiments on a lab cluster stand on: it brings the
// cluster up, starts servers, agents and load generators in it, and leaves
// nothing behind.
//
// Everything of a harness that is not the cluster's own lives in one directory,
// the agents' bpf file system among it. Unmounting that drops every pinned
// object at once, whatever state the agents were in.
package harness

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/test/testbed/topology"
)

// root holds a directory for each harness. It is not in the lab's own state
// directory, which "lab down" must be able to remove while a file system is
// still mounted here.
const root = "/run/spillway-rig"

// Harness is a running cluster and the processes in it.
type Harness struct {
	Cluster *topology.Cluster
	// Program is the running program, which is started again to generate load.
	Program string

	dir        string
	lock       *os.File
	agents     []*process // kube-proxies too
	api        *http.Server
	kubeconfig string          // of api
	life       context.Context // of the servers
	end        context.CancelFunc
	servers    []chan struct{} // each closed when the server has ended
	pids       map[string]int  // of the last server of each host
}

// Up builds the cluster. It first removes the objects that a killed harness of
// that name left. It returns an error if a harness of that name still runs. The
// caller must call Down, also when it fails later.
func Up(ctx context.Context, spec topology.Spec) (*Harness, error) {
	if err := topology.RequireRoot(); err != nil {
		return nil, err
	}
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	h := &Harness{Program: program, dir: filepath.Join(root, spec.Name)}
	h.life, h.end = context.WithCancel(context.WithoutCancel(ctx))
	if h.lock, err = lockDir(h.dir); err != nil {
		h.end()
		return nil, err
	}
	if err := h.build(ctx, spec); err != nil {
		return nil, errors.Join(err, h.Down())
	}
	return h, nil
}

func (h *Harness) build(ctx context.Context, spec topology.Spec) error {
	if err := topology.Down(spec.Name); err != nil {
		return fmt.Errorf("remove what an earlier run left: %w", err)
	}
	if err := emptyDir(h.dir); err != nil {
		return fmt.Errorf("remove what an earlier run left: %w", err)
	}
	bpf := h.Path("bpf")
	if err := os.Mkdir(bpf, 0o700); err != nil {
		return fmt.Errorf("make directory for pinned objects: %w", err)
	}
	if err := unix.Mount("bpf", bpf, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpf file system on %s: %w", bpf, err)
	}
	var err error
	h.Cluster, err = topology.Up(ctx, spec)
	return err
}

// Path returns the path of a file in the harness's own directory.
func (h *Harness) Path(name string) string { return filepath.Join(h.dir, name) }

// WriteFile writes a file in the harness's directory, making directories on the
// way, and returns its path.
func (h *Harness) WriteFile(name string, text []byte) (string, error) {
	path := h.Path(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("write %s: %w", name, err)
	}
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return "", fmt.Errorf("write %s: %w", name, err)
	}
	return path, nil
}

// Down ends all processes, agents first, and removes the cluster. It does not
// depend on the context of Up. A second call does nothing.
func (h *Harness) Down() error {
	if h.lock == nil {
		return nil
	}
	for _, p := range h.agents {
		p.signal()
	}
	for _, p := range h.agents {
		p.wait(2 * time.Second)
	}
	if h.api != nil {
		h.api.Close()
	}
	h.end()
	h.waitServers()
	var err error
	if h.Cluster != nil {
		err = h.Cluster.Down()
	}
	err = errors.Join(err, emptyDir(h.dir))
	if err == nil {
		_ = os.Remove(h.dir)
		_ = os.Remove(root) // if this was the last harness
	}
	h.lock.Close()
	h.lock = nil
	return err
}

// End removes the clusters of an experiment, of which some may be nil. It returns err with the errors
// of the removal. If ctx has ended, it returns why instead of err.
func End(ctx context.Context, err error, p *experiment.Progress, clusters ...*Harness) error {
	if ctx.Err() != nil {
		err = EndError(ctx)
	}
	p.Step("removing what was built")
	for _, h := range clusters {
		if h != nil {
			err = errors.Join(err, h.Down())
		}
	}
	p.Done()
	return err
}

// EndError returns a readable error for the end of a context: the operation that was
// active fails with an error of its own that does not name the cause.
func EndError(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), context.Canceled) {
		return errors.New("interrupted")
	}
	return context.Cause(ctx)
}

// lockDir makes the directory and locks it. The lock ends with the process.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make %s: %w", dir, err)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: another run with the name %q is under way: wait for it, or choose another --name",
				dir, filepath.Base(dir))
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return f, nil
}

// emptyDir removes everything in a directory, a mounted bpf file system included.
func emptyDir(dir string) error {
	for _, mounted := range []string{"bpf", planeDir} {
		for {
			err := unix.Unmount(filepath.Join(dir, mounted), unix.MNT_DETACH)
			if err != nil {
				break // EINVAL or ENOENT: nothing is mounted there any more
			}
		}
	}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}
