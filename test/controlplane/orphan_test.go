package controlplane

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// orphanVariable makes this test binary start a control plane in a directory, report
// that, and wait to be killed.
const orphanVariable = "SPILLWAY_TEST_ORPHAN"

func startOrphans(dir string) {
	c, err := controlplane.Up(context.Background(), controlplane.Config{Dir: dir})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(strings.Trim(fmt.Sprint(c.Processes()), "[]"))
	time.Sleep(time.Hour)
	os.Exit(1)
}

func TestTheControlPlaneDiesWithWhoStartedIt(t *testing.T) {
	dir := must[string](t)(makeDir())
	removeAtEnd(t, dir)
	cmd := exec.Command(must[string](t)(os.Executable()))
	cmd.Env = append(os.Environ(), orphanVariable+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	ids := strings.Fields(line)
	if err != nil || len(ids) != 2 {
		t.Fatalf("started %q (%v), want two programs", line, err)
	}
	for _, id := range ids {
		await.True(t, "the end of process "+id+", whose parent has ended", func() bool { return !running(id) })
	}
}

// running reports whether a process is there and not a zombie.
func running(id string) bool {
	text, err := os.ReadFile("/proc/" + id + "/stat")
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(state, "Z")
}
