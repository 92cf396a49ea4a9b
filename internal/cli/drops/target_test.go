package drops

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/test/await"
)

// said collects the output of a command while it runs.
type said struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *said) wait(t *testing.T, what string) {
	t.Helper()
	await.NoError(t, func() error {
		if text := s.String(); !strings.Contains(text, what) {
			return fmt.Errorf("%q was not said: %s", what, text)
		}
		return nil
	})
}

func TestDropsFollowsANamespaceThatIsMadeAnew(t *testing.T) {
	name := fmt.Sprintf("spw-cmd-drops-%d", os.Getpid())
	ip := func(script string) {
		t.Helper()
		if out, err := exec.Command("bash", "-ec", strings.ReplaceAll(script, "NAME", name)).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	ip("ip netns add NAME")
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	var out, errs said
	done := make(chan int)
	go func() {
		done <- run([]string{"drops", "--netns", name, "--port", "9", "--count", "1", "--for", "30s"}, &out, &errs)
	}()
	errs.wait(t, "following dropped packets")
	ip("ip netns del NAME")
	errs.wait(t, "spillway: --netns "+name+" is gone")
	ip("ip netns add NAME; ip -n NAME link set lo up")
	errs.wait(t, "spillway: --netns "+name+" is another network namespace now")
	ip("ip netns exec NAME bash -c 'echo lost >/dev/udp/127.0.0.1/9'")
	if code := <-done; code != cli.ExitDone || !strings.Contains(out.String(), "NO_SOCKET in "+name) {
		t.Errorf("exit code %d: %s%s", code, &out, &errs)
	}
	if !strings.Contains(errs.String(), "spillway: by reason: NO_SOCKET 1\n") {
		t.Errorf("summary: %s", &errs)
	}
	if strings.Count(errs.String(), "is gone") != 1 {
		t.Errorf("said more than once: %s", &errs)
	}
}
