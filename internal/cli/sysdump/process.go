package sysdump

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/diagnosis/sysdump"
)

// secretsTimeout is the time that the search for secrets may take. It reads a few small files;
// a file system of another program may not answer at all.
const secretsTimeout = 20 * time.Second

// Bounds of what is read of a process, in bytes.
const (
	mostArgs   = 256 << 10
	mostSecret = 64 << 10
)

// agentProcesses returns the arguments of processes "spillway agent" of root, by process id.
// Anyone can name a process so, and a file in its arguments. So nothing that the process
// controls is read before its user and its executable are known: also the read of a command
// line may wait for the process, which chooses the memory behind it.
func agentProcesses(proc string) map[string][]string {
	found := map[string][]string{}
	dirs, _ := filepath.Glob(filepath.Join(proc, "[0-9]*"))
	for _, dir := range dirs {
		if !isRoots(dir) || !isSpillway(dir) {
			continue
		}
		text, _ := readHead(filepath.Join(dir, "cmdline"), mostArgs) // the process may have ended
		args := strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")
		if len(args) > 1 && filepath.Base(args[0]) == "spillway" && args[1] == "agent" {
			found[filepath.Base(dir)] = args
		}
	}
	return found
}

// isRoots reports whether all user ids of a process are root's. The kernel shows them as this
// process's user namespace has them: the root of a pod's own user namespace is another user.
// The real id counts too: a setuid program runs with the arguments of the user who starts it.
func isRoots(dir string) bool {
	text, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if ids, ok := strings.CutPrefix(line, "Uid:"); ok {
			return slices.Equal(strings.Fields(ids), []string{"0", "0", "0", "0"})
		}
	}
	return false
}

// isSpillway reports whether a process runs an executable of this name. An upgrade may have
// deleted the file.
func isSpillway(dir string) bool {
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	return err == nil && filepath.Base(strings.TrimSuffix(exe, " (deleted)")) == "spillway"
}

// secrets returns what must not be in the archive and is known: values of the environment of
// this process and of the agents, and the files that agents' flags name. It fails when ctx
// ends, or after secretsTimeout: an archive without the list may have secrets.
func (n *node) secrets(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, secretsTimeout, fmt.Errorf("not done after %v", secretsTimeout))
	defer cancel()
	found := make(chan []string, 1)
	go func() { found <- n.readSecrets() }()
	select {
	case list := <-found:
		return list, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("read the secrets of the agents on this node, to remove them: %w", context.Cause(ctx))
	}
}

func (n *node) readSecrets() []string {
	found := sysdump.Environment(os.Environ())
	for pid, args := range agentProcesses(n.proc) {
		dir := filepath.Join(n.proc, pid)
		env, _ := readHead(filepath.Join(dir, "environ"), mostArgs)
		found = append(found, sysdump.Environment(strings.Split(string(env), "\x00"))...)
		for i, arg := range args {
			flag, value, joined := strings.Cut(arg, "=")
			if !joined && i+1 < len(args) {
				value = args[i+1]
			}
			if strings.HasPrefix(flag, "-") && sysdump.SecretName(flag) && strings.HasSuffix(flag, "-file") {
				text, _ := readInRoot(filepath.Join(dir, "root"), value)
				// A file of keys has one in each line.
				found = append(append(found, string(text)), strings.Split(string(text), "\n")...)
			}
		}
	}
	return found
}

// readInRoot reads the beginning of a regular file, whose name holds in a process's root
// directory. Symbolic links stay in that root; Secrets of Kubernetes are such links. The file
// is opened for reading when it is known to be regular: a FIFO would block, and a device may
// do anything.
func readInRoot(root, name string) ([]byte, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, err
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, errors.New("not a regular file")
	}
	return readHead(fmt.Sprintf("/proc/self/fd/%d", fd), mostSecret)
}

// readHead reads the beginning of a file.
func readHead(file string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, fs.FileMode(0))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}
