package topology

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"

	"golang.org/x/sys/unix"
)

// namespaceDir is the directory of ip netns' names.
const namespaceDir = "/run/netns"

func namespaceName(cluster, host string) string { return "spw-" + cluster + "-" + host }

func namespacePath(name string) string { return filepath.Join(namespaceDir, name) }

// inNamespace runs fn with the calling goroutine's thread in a named namespace.
func inNamespace(name string, fn func() error) error {
	target, err := os.Open(namespacePath(name))
	if err != nil {
		return fmt.Errorf("enter namespace %s: %w", name, err)
	}
	defer target.Close()
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open the thread's network namespace: %w", err)
	}
	defer home.Close()
	if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter namespace %s: %w", name, err)
	}
	// Deferred, so that a test's FailNow in fn cannot strand the thread. A
	// thread that cannot go home stays locked; the runtime then ends it.
	defer func() {
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return fn()
}

// ensureNamespace creates a missing named network namespace.
func ensureNamespace(name string) error {
	path := namespacePath(name)
	if isNamespace(path) {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	f.Close()
	done := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine, and with it its
		// stay in the new namespace.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}

func isNamespace(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

// ensureNamespaceDir makes the directory a shared mount point, as ip netns does.
// Otherwise the first call of ip would bind the directory over the lab's namespaces,
// whose files could then not be removed (EBUSY).
func ensureNamespaceDir() error {
	if err := os.MkdirAll(namespaceDir, 0o755); err != nil {
		return fmt.Errorf("create namespace directory: %w", err)
	}
	dir, err := os.Open(namespaceDir)
	if err != nil {
		return fmt.Errorf("open namespace directory: %w", err)
	}
	defer dir.Close()
	// The lock of ip netns.
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", namespaceDir, err)
	}
	err = unix.Mount("", namespaceDir, "", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) {
		if err = unix.Mount(namespaceDir, namespaceDir, "", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", namespaceDir, "", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if err != nil {
		return fmt.Errorf("share mount %s: %w", namespaceDir, err)
	}
	return nil
}

// removeNamespace removes a name. The kernel deletes the namespace after its last process
// and socket.
func removeNamespace(name string) error {
	path := namespacePath(name)
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err != nil {
			break // EINVAL: not mounted any more
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove namespace %s: %w", name, err)
	}
	return nil
}

// Namespaces lists the names that belong to a cluster. The whole name must match:
// "spw-a-" also begins the names of a cluster called a-b.
func Namespaces(cluster string) ([]string, error) {
	rule := regexp.MustCompile("^" + regexp.QuoteMeta(namespaceName(cluster, "")) + `(lan|node\d+(-pod\d+)?|client\d+)$`)
	entries, err := os.ReadDir(namespaceDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var names []string
	for _, e := range entries {
		if rule.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
