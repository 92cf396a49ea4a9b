package sysdump

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
)

// asleep is set in the environment of a process that only has a name and arguments.
const asleep = "SPILLWAY_TEST_ASLEEP"

func TestMain(m *testing.M) {
	if os.Getenv(asleep) != "" {
		fmt.Println("started")
		for { // without cgo, the runtime reports select {} as a deadlock
			_ = unix.Pause()
		}
	}
	os.Exit(m.Run())
}

// processes makes procDir a directory of the test.
func processes(t *testing.T) {
	t.Helper()
	before := procDir
	procDir = t.TempDir()
	t.Cleanup(func() { procDir = before })
}

func fifo(t *testing.T, path string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(path, 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// secretsOf returns the secrets, and ends the test if nothing is returned.
func secretsOf(t *testing.T, proc string) []string {
	t.Helper()
	done := make(chan []string, 1)
	go func() { done <- (&node{proc: proc}).readSecrets() }()
	var got []string
	await.True(t, "the search for secrets ends", func() bool {
		select {
		case got = <-done:
			return true
		default:
			return false
		}
	})
	return got
}

// Only root's processes are agents: others may have the name, and name any file.
func TestOnlyRootsProcessesAreAgents(t *testing.T) {
	for _, c := range []struct {
		name, uids, exe string
		is              bool
	}{
		{"root's", "0\t0\t0\t0", "/usr/bin/spillway", true},
		{"after an upgrade of the file", "0\t0\t0\t0", "/usr/bin/spillway (deleted)", true},
		{"nobody's", "65534\t65534\t65534\t65534", "/tmp/spillway", false},
		{"a setuid program with a user's arguments", "65534\t0\t0\t0", "/usr/bin/spillway", false},
		{"the root of a pod's user namespace", "65536\t65536\t65536\t65536", "/usr/bin/spillway", false},
		{"another program of root", "0\t0\t0\t0", "/usr/bin/sudo", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			processes(t)
			dir := plantProcess(t, "9", []string{"spillway", "agent", "--x-token-file=/token"})
			write(t, filepath.Join(dir, "status"), "Name:\tspillway\nUid:\t"+c.uids+"\n")
			write(t, filepath.Join(dir, "root", "token"), "the token")
			if err := errors.Join(os.Remove(filepath.Join(dir, "exe")), os.Symlink(c.exe, filepath.Join(dir, "exe"))); err != nil {
				t.Fatal(err)
			}
			if got := secretsOf(t, procDir); slices.Contains(got, "the token") != c.is {
				t.Errorf("secrets %q", got)
			}
		})
	}
}

// A file of secrets is a regular file in the root of the process, however its name leads there.
func TestFilesOfSecrets(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(t *testing.T, root, file string)
		read bool
	}{
		{"a file", func(t *testing.T, _, file string) { write(t, file, "the token") }, true},
		{"a link of the kubelet", func(t *testing.T, root, file string) {
			write(t, filepath.Join(root, "..data", "token"), "the token")
			link(t, "..data/token", file)
		}, true},
		{"an absolute link, which holds in that root", func(t *testing.T, root, file string) {
			write(t, filepath.Join(root, "elsewhere"), "the token")
			link(t, "/elsewhere", file)
		}, true},
		{"a link out of that root", func(t *testing.T, root, file string) {
			link(t, write(t, filepath.Join(root, "..", "outside"), "the token"), file)
		}, false},
		{"a link up and out of it", func(t *testing.T, root, file string) {
			write(t, filepath.Join(root, "..", "outside"), "the token")
			link(t, "../outside", file)
		}, false},
		{"a FIFO", func(t *testing.T, _, file string) { fifo(t, file) }, false},
		{"a link to a FIFO", func(t *testing.T, root, file string) {
			fifo(t, filepath.Join(root, "fifo"))
			link(t, "fifo", file)
		}, false},
		{"a directory", func(t *testing.T, _, file string) {
			if err := os.Mkdir(file, 0o755); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			processes(t)
			dir := plantProcess(t, "9", []string{"spillway", "agent", "--x-token-file=/token"})
			root := filepath.Join(dir, "root")
			if err := os.Mkdir(root, 0o755); err != nil {
				t.Fatal(err)
			}
			c.make(t, root, filepath.Join(root, "token"))
			if got := secretsOf(t, procDir); slices.Contains(got, "the token") != c.read {
				t.Errorf("secrets %q", got)
			}
		})
	}
	processes(t)
	dir := plantProcess(t, "9", []string{"spillway", "agent", "--x-token-file=/token"})
	write(t, filepath.Join(dir, "root", "token"), strings.Repeat("x", 10*mostSecret))
	for _, s := range secretsOf(t, procDir) {
		if len(s) > mostSecret {
			t.Errorf("%d bytes of a file were read, want at most %d", len(s), mostSecret)
		}
	}
}

func link(t *testing.T, to, file string) {
	t.Helper()
	if err := os.Symlink(to, file); err != nil {
		t.Fatal(err)
	}
}

// The kernel shows users and executables as isRoots and isSpillway expect.
func TestProcessesOfOtherUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to start processes of other users")
	}
	dir, err := os.MkdirTemp("", "spillway-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "spillway")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(program, text, 0o755)); err != nil {
		t.Fatal(err)
	}
	file := fifo(t, filepath.Join(dir, "fifo"))
	pids := map[uint32]string{}
	for _, uid := range []uint32{0, 65534} {
		cmd := exec.Command(program)
		cmd.Args = []string{"spillway", "agent", "--x-token-file=" + file}
		cmd.Env = []string{asleep + "=1"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		if _, err := out.Read(make([]byte, 1)); err != nil { // it has its name now
			t.Fatal(err)
		}
		pids[uid] = fmt.Sprint(cmd.Process.Pid)
	}
	found := agentProcesses("/proc")
	if found[pids[0]] == nil || found[pids[65534]] != nil {
		t.Errorf("root's process %s, another user's %s: found %v", pids[0], pids[65534], found)
	}
	secretsOf(t, "/proc")
}

// A signal ends the command also where a file system does not answer; nothing is written then,
// since the secrets are not known.
func TestTheSearchForSecretsEndsWithTheCommand(t *testing.T) {
	processes(t)
	fifo(t, filepath.Join(procDir, "9", "status")) // as a file system that hangs
	t.Cleanup(func() {
		if f, err := os.OpenFile(filepath.Join(procDir, "9", "status"), os.O_WRONLY|unix.O_NONBLOCK, 0); err == nil {
			f.Close() // the reader ends
		}
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("a signal"))
	file := filepath.Join(t.TempDir(), "dump.tar.gz")
	cmd := NewCommand()
	cmd.SetArgs([]string{"--cluster=false", "--file", file})
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	err := cmd.ExecuteContext(ctx)
	if err == nil || !strings.Contains(err.Error(), "to remove them: a signal") {
		t.Errorf("got error %v", err)
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an archive is written: %v", err)
	}
}
