package kubeproxy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

// healthPort is the default port of kube-proxy's health server.
const healthPort = 10256

// Running returns the sign of a running kube-proxy in the network namespace, "" if there
// is none. The sign is a process of its name, or another process that listens on
// healthPort. The former is visible only with the node's processes (hostPID of a Pod).
// The latter is the only sign of a kube-proxy inside another program (k3s).
func Running() (sign string, err error) {
	if pid, err := process("/proc"); pid != 0 || err != nil {
		return fmt.Sprintf("process %d", pid), err
	}
	taken, err := portTaken(healthPort)
	if taken {
		sign = fmt.Sprintf("another process has port %d", healthPort)
	}
	return sign, err
}

// process finds a process named kube-proxy in the calling thread's network
// namespace; 0 if there is none.
func process(proc string) (pid int, err error) {
	own, err := networkOf("/proc/thread-self")
	if err != nil {
		return 0, fmt.Errorf("detect kube-proxy: %w", err)
	}
	names, err := filepath.Glob(proc + "/[0-9]*/comm")
	if err != nil {
		return 0, fmt.Errorf("detect kube-proxy: %w", err)
	}
	for _, name := range names {
		// A process that ends meanwhile has neither name nor namespace.
		comm, _ := os.ReadFile(name)
		if strings.TrimSpace(string(comm)) != "kube-proxy" {
			continue
		}
		dir := filepath.Dir(name)
		if network, err := networkOf(dir); err == nil && network == own {
			return strconv.Atoi(filepath.Base(dir))
		}
	}
	return 0, nil
}

// networkOf returns a number that all processes of one network namespace share: the inode
// of a file that exists once per namespace. The link /proc/PID/ns/net has the same
// information, but needs CAP_SYS_PTRACE if the other process has more capabilities, as
// kube-proxy has.
func networkOf(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir+"/net/dev", &st); err != nil {
		return 0, fmt.Errorf("read network namespace of %s: %w", dir, err)
	}
	return st.Ino, nil
}

// portTaken reports whether a TCP socket of another process listens on a port.
func portTaken(port uint16) (bool, error) {
	listeners, err := kernel.Listeners()
	if err != nil {
		return false, fmt.Errorf("detect kube-proxy: %w", err)
	}
	var inodes []string
	for _, l := range listeners {
		if l.Protocol == unix.IPPROTO_TCP && l.Addr.Port() == port {
			inodes = append(inodes, l.Inode)
		}
	}
	if len(inodes) == 0 {
		return false, nil
	}
	own, err := ownSockets()
	return slices.ContainsFunc(inodes, func(i string) bool { return !own[i] }), err
}

// ownSockets returns the inodes of this process's sockets.
func ownSockets() (map[string]bool, error) {
	files, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return nil, fmt.Errorf("detect kube-proxy: %w", err)
	}
	own := map[string]bool{}
	for _, file := range files {
		link, _ := os.Readlink(file)
		if inode, ok := strings.CutPrefix(link, "socket:["); ok {
			own[strings.TrimSuffix(inode, "]")] = true
		}
	}
	return own, nil
}
