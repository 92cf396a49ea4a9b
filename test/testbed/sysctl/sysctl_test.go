package sysctl

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
)

// The test binary is the keeper, and a program that is killed while it has changed
// values. Values are files of a simulated /proc/sys.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "keep" {
		if keep(os.Stdin, os.Args[2], os.Args[3]) != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) == 4 && os.Args[1] == "hold" {
		g, err := begin(os.Args[2], os.Args[3], keeper(os.Args[2], os.Args[3]))
		if err != nil || g.Set("net.a", "2") != nil || g.Set("net.b", "20") != nil || g.Set("net.a", "3") != nil {
			os.Exit(1)
		}
		os.Stdout.WriteString("held\n")
		time.Sleep(time.Minute)
	}
	os.Exit(m.Run())
}

func keeper(dir, root string) []string { return []string{os.Args[0], "keep", dir, root} }

func machine(t *testing.T) (dir, root string) {
	t.Helper()
	dir, root = t.TempDir(), t.TempDir()
	if err := os.Mkdir(root+"/net", 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, root, "a", "1")
	write(t, root, "b", "10")
	return dir, root
}

func write(t *testing.T, root, name, value string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(root, "net", name), []byte(value+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, root, a, b string) {
	t.Helper()
	for name, value := range map[string]string{"a": a, "b": b} {
		text, err := os.ReadFile(filepath.Join(root, "net", name))
		if got := strings.TrimSpace(string(text)); err != nil || got != value {
			t.Errorf("%s is %q, want %q (%v)", name, got, value, err)
		}
	}
}

func TestEndRestoresAndTheLockHolds(t *testing.T) {
	dir, root := machine(t)
	g, err := begin(dir, root, keeper(dir, root))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Set("net.a", "5"); err != nil {
		t.Fatal(err)
	}
	want(t, root, "5", "10")
	if _, err := begin(dir, root, nil); err == nil || !strings.Contains(err.Error(), "another experiment") {
		t.Errorf("the lock was given twice: %v", err)
	}
	if err := g.Set("net.nothing", "5"); err == nil {
		t.Error("a value that there is not was set")
	}
	if err := g.End(); err != nil {
		t.Fatal(err)
	}
	want(t, root, "1", "10")
	again, err := begin(dir, root, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.End(); err != nil {
		t.Error(err)
	}
}

// hold starts a process that has changed the values, and returns it.
func hold(t *testing.T, dir, root string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], "hold", dir, root)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, out)
	want(t, root, "3", "20")
	return cmd
}

func TestAKillRestores(t *testing.T) {
	dir, root := machine(t)
	cmd := hold(t, dir, root)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	// Only the keeper may restore here; begin would restore too.
	await.True(t, "the keeper has taken the journal away", func() bool {
		_, err := os.Stat(dir + "/journal")
		return os.IsNotExist(err)
	})
	want(t, root, "1", "10")
	await.True(t, "the keeper has given up the lock", func() bool {
		g, err := begin(dir, root, nil)
		return err == nil && g.End() == nil
	})
}

func TestTestsExcludeExperimentsAndNotEachOther(t *testing.T) {
	dir, root := machine(t)
	first, err := exclude(dir)
	if err != nil {
		t.Fatal(err)
	}
	second, err := exclude(dir)
	if err != nil {
		t.Fatal(err)
	}
	first()
	if _, err := begin(dir, root, nil); err == nil || !strings.Contains(err.Error(), "a test goes by them") {
		t.Errorf("an experiment begins while a test goes by the values: %v", err)
	}
	second()
	g, err := begin(dir, root, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.End(); err != nil {
		t.Error(err)
	}
}

// An experiment that changes nothing waits for the end of one that does.
func TestShareWaitsAndEndsWithItsContext(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	guard, err := begin(dir, root, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if _, err := share(ctx, dir, cancel); !errors.Is(err, context.Canceled) { // it stops when waiting is called
		t.Errorf("beside an experiment that changes values: %v", err)
	}
	release, err := share(context.Background(), dir, func() {
		if err := guard.End(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := begin(dir, root, nil); err == nil {
		t.Error("values may be changed while another experiment depends on them")
	}
	release()
	if guard, err = begin(dir, root, nil); err != nil {
		t.Fatal(err)
	}
	if err := guard.End(); err != nil {
		t.Error(err)
	}
}

func TestTheNextRunRestoresWhatAKilledKeeperDidNot(t *testing.T) {
	dir, root := machine(t)
	g, err := begin(dir, root, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Set("net.b", "11"); err != nil {
		t.Fatal(err)
	}
	g.lock.Close() // as the kernel does when a process is killed
	next, err := begin(dir, root, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer next.End()
	want(t, root, "1", "10")
}
