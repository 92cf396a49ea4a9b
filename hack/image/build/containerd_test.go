package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

// containerd starts a containerd of the test's own, and returns its ctr.
func containerd(t *testing.T) func(args ...string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctr-") // the path of a socket is short
	noError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	config := filepath.Join(dir, "config.toml")
	noError(t, os.WriteFile(config, fmt.Appendf(nil, `version = 2
root = "%[1]s/root"
state = "%[1]s/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "%[1]s/sock"
`, dir), 0o600))
	var log strings.Builder
	server := exec.Command("containerd", "--config", config)
	server.Stdout, server.Stderr = &log, &log
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	noError(t, server.Start())
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGTERM)
		_ = server.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	// runc leaves the cgroup of the namespace.
	namespace := filepath.Base(dir)
	t.Cleanup(func() {
		for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
			found, _ := filepath.Glob(pattern + namespace)
			for _, cgroup := range found {
				if err := os.Remove(cgroup); err != nil && !errors.Is(err, fs.ErrNotExist) { // two names of one hierarchy
					t.Error(err)
				}
			}
		}
	})
	ctr := func(args ...string) (string, error) {
		out, err := exec.Command("ctr", slices.Concat([]string{"--address", filepath.Join(dir, "sock"), "--namespace", namespace},
			args)...).CombinedOutput()
		return string(out), err
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		out, err := ctr("version")
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("containerd does not answer: %s", out)
		}
	}
	return func(args ...string) string {
		t.Helper()
		out, err := ctr(args...)
		if err != nil {
			t.Fatalf("ctr %s: %v: %s", strings.Join(args, " "), err, out)
		}
		return out
	}
}

// pushed pushes the image to a registry of the test's own, and returns its name with its
// digest, as make image-push prints it.
func pushed(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	to := strings.TrimPrefix(server.URL, "http://") + "/spillway:test"
	out, err := exec.Command("go", "run", "../push", "-layout", filepath.Join(built, "image"), "-to", to).Output()
	noError(t, err)
	return strings.TrimSpace(string(out))
}

// With image.digest in the chart's values, a node pulls by digest.
func TestContainerdPullsTheImageByItsDigest(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root")
	}
	ctr, name := containerd(t), pushed(t)
	if digest, _ := images(t, built); !strings.HasSuffix(name, "@"+digest) {
		t.Fatalf("pushed %s, want digest %s", name, digest)
	}
	ctr("images", "pull", "--plain-http", name)
	if out := ctr("run", "--rm", "--read-only", name, "pulled", "/usr/bin/spillway", "version"); !strings.Contains(out, "commit") {
		t.Errorf("version: %q", out)
	}
}

// After a cleanup the chart's container is idle, as a user without rights, and ends at
// once when its Pod is deleted.
func TestTheWaitAfterACleanupEndsWithSIGTERM(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root")
	}
	_, all := images(t, built)
	dir := unpack(t, all[runtime.GOARCH])
	noError(t, os.Chmod(dir, 0o755))
	wait := exec.Command("/usr/bin/spillway", "chart", "wait")
	wait.SysProcAttr = &syscall.SysProcAttr{Chroot: dir, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, Pdeathsig: syscall.SIGKILL}
	wait.Dir = "/"
	out, err := wait.StdoutPipe()
	noError(t, err)
	noError(t, wait.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.Contains(line, "waiting until the Pod is deleted") {
		t.Errorf("%q, %v", line, err)
	}
	noError(t, wait.Process.Signal(syscall.SIGTERM))
	if err := wait.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
}

// The archive is what a user imports on a node.
func TestContainerdRunsTheImage(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root")
	}
	ctr := containerd(t)
	version, err := os.ReadFile(filepath.Join(root, "VERSION"))
	noError(t, err)
	name := "docker.io/library/spillway:" + strings.TrimSpace(string(version))
	ctr("images", "import", filepath.Join(built, "image.tar"))
	digest, _ := images(t, built)
	if list := ctr("images", "ls"); !strings.Contains(list, name) || !strings.Contains(list, digest) {
		t.Errorf("images:\n%s\nwant %s with %s", list, name, digest)
	}
	run := func(id string, command ...string) string {
		t.Helper()
		return ctr(append([]string{"run", "--rm", "--read-only", name, id}, command...)...)
	}
	if out := run("version", "/usr/bin/spillway", "version"); !strings.Contains(out, strings.TrimSpace(string(version))) {
		t.Errorf("version: %q", out)
	}
	if out := run("iptables", "/usr/sbin/iptables-legacy", "-V"); !strings.Contains(out, "legacy") {
		t.Errorf("iptables-legacy: %q", out)
	}
}
