package topology

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cgroupParent is the parent of the clusters' cgroups.
const cgroupParent = "spillway-lab"

// killAfter is how long processes get to end by themselves after SIGTERM.
const killAfter = 2 * time.Second

// cgroupMount finds the mount point of cgroup2: /sys/fs/cgroup on a unified system,
// /sys/fs/cgroup/unified on a hybrid one.
func cgroupMount() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	defer f.Close()
	var found []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		if fields := strings.Fields(before); len(fields) > 4 && strings.HasPrefix(after, "cgroup2 ") {
			found = append(found, fields[4])
		}
	}
	if len(found) == 0 {
		return "", errors.New(`find cgroup2: not mounted: run "mount -t cgroup2 none /sys/fs/cgroup/unified"`)
	}
	for _, usual := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if slices.Contains(found, usual) {
			return usual, nil
		}
	}
	return found[0], nil
}

// clusterCgroup returns the parent of the cgroups of a cluster's hosts.
func clusterCgroup(name string) (string, error) {
	mount, err := cgroupMount()
	if err != nil {
		return "", err
	}
	return filepath.Join(mount, cgroupParent, name), nil
}

func joinCgroup(path string) error {
	if err := os.WriteFile(path+"/cgroup.procs", []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return fmt.Errorf("join cgroup: %w", err)
	}
	return nil
}

// cgroupProcesses reads the processes of one cgroup, without its descendants.
func cgroupProcesses(path string) ([]int, error) {
	text, err := os.ReadFile(path + "/cgroup.procs")
	if err != nil {
		return nil, fmt.Errorf("read processes: %w", err)
	}
	var pids []int
	for _, field := range strings.Fields(string(text)) {
		// 0 means a process that this pid namespace cannot see.
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// cgroupTree lists a cgroup and its descendants, the deepest first.
func cgroupTree(root string) ([]string, error) {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list cgroups: %w", err)
	}
	slices.Reverse(dirs)
	return dirs, nil
}

// treeProcesses lists the processes in a cgroup and below it.
func treeProcesses(root string) ([]int, error) {
	dirs, err := cgroupTree(root)
	if err != nil {
		return nil, err
	}
	var all []int
	for _, dir := range dirs {
		pids, err := cgroupProcesses(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENODEV) {
			return nil, err
		}
		all = append(all, pids...)
	}
	return all, nil
}

// endProcesses ends all processes in a cgroup: by SIGTERM, and after killAfter by
// SIGKILL. The cgroup itself is the record of the cluster's processes. Unlike a file of
// process ids it survives crashes, follows forks, and cannot name an unrelated process
// that reuses an id.
func endProcesses(root string) error {
	pids, err := treeProcesses(root)
	if err != nil {
		return err
	}
	for _, pid := range []int{1, os.Getpid()} {
		// Another program moved it there, and cgroup.kill would end it.
		if slices.Contains(pids, pid) {
			return fmt.Errorf("end processes: process %d is in the cluster's cgroup and must not end: move it out of %s first", pid, root)
		}
	}
	for _, pid := range pids {
		terminate(pid, root)
	}
	deadline := time.Now().Add(killAfter)
	for len(pids) > 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
		if pids, err = treeProcesses(root); err != nil {
			return err
		}
	}
	if len(pids) == 0 {
		return nil
	}
	// cgroup.kill (Linux 5.14) also reaches processes that fork meanwhile.
	if err := os.WriteFile(root+"/cgroup.kill", []byte("1"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("kill processes: %w", err)
	}
	return nil
}

// terminate sends SIGTERM to a process if it is in the cgroup. It opens a pidfd first,
// which cannot refer to another process between the check and the signal.
func terminate(pid int, root string) {
	p, err := os.FindProcess(pid)
	if err != nil {
		return
	}
	defer func() { _ = p.Release() }()
	_, below, _ := strings.Cut(root, "/"+cgroupParent+"/")
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err == nil && strings.Contains(string(text)+"/", "/"+cgroupParent+"/"+below+"/") {
		_ = p.Signal(syscall.SIGTERM) // it may have ended already
	}
}

// removeCgroups removes a cgroup and its descendants. A killed process leaves
// its cgroup only when the kernel has finished it, hence the patience.
func removeCgroups(ctx context.Context, root string) error {
	for {
		dirs, err := cgroupTree(root)
		if err != nil {
			return err
		}
		var busy error
		for _, dir := range dirs {
			if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
				busy = err
			}
		}
		if busy == nil {
			_ = os.Remove(filepath.Dir(root)) // the common parent, if this was the last cluster
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup: %w", busy)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
