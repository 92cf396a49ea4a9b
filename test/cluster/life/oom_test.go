package life

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// memoryLimit is what agents may use before the kernel kills them.
const memoryLimit = "512Mi"

// exhaustMemory has the kernel's OOM killer end every agent: a process in the agent's
// container writes a file in memory until the container's limit is reached. The file
// belongs to the container, but to no process, so the agent is the largest one to kill.
func exhaustMemory(t *testing.T, c *cluster.Cluster) {
	clustertest.Must(t, c.InstallSpillway(t.Context(), "resources.limits.memory="+memoryLimit))
	for node, pod := range agents(t, c) {
		cgroup, err := memoryCgroup(pod.PID())
		clustertest.Must(t, err)
		file := filepath.Join("/dev/shm", c.Name+"-"+node)
		t.Cleanup(func() { _ = os.Remove(file) })
		// The kernel may kill it after the agent.
		_ = exec.CommandContext(t.Context(), "bash", "-euc",
			`echo 0 >"$1/cgroup.procs"; exec head --bytes="${3%i}" /dev/zero >"$2"`, "bash", cgroup, file, memoryLimit).Run()
		_ = os.Remove(file)
	}
	await.True(t, "the kernel has killed every agent for its memory, and each is started again", func() bool {
		out, err := c.Kubectl(t.Context(), "--namespace", "kube-system", "get", "pods", "--selector=app.kubernetes.io/name=spillway",
			"--output=jsonpath={range .items[*].status.containerStatuses[0]}{.lastState.terminated.reason} {.ready}{'\\n'}{end}")
		return err == nil && strings.Count(out, "OOMKilled true\n") == 3
	})
}

// memoryCgroup returns the cgroup that counts the memory of a process: of v1 if the
// machine has its memory controller there, else of v2.
func memoryCgroup(pid int) (string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", fmt.Errorf("find memory cgroup: %w", err)
	}
	found := ""
	for line := range strings.Lines(string(text)) {
		id, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		if controllers == "memory" {
			return filepath.Join("/sys/fs/cgroup/memory", path), nil
		}
		if id == "0" {
			found = filepath.Join("/sys/fs/cgroup", path)
		}
	}
	if found == "" {
		return "", fmt.Errorf("find memory cgroup: process %d has none", pid)
	}
	return found, nil
}
