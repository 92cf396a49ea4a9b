package attach

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/must"
)

// TestALinkThatCannotBeOpenedKeepsItsPin: without a free file descriptor the agent cannot
// tell whether a pin is of a program that serves.
func TestALinkThatCannotBeOpenedKeepsItsPin(t *testing.T) {
	needsTCX(t)
	enterNetns(t)
	hooks := &tcxHooks{dir: filepath.Join(mountBPF(t), "links"), links: map[hook]*tcxLink{}}
	must.Do(t, os.MkdirAll(hooks.dir, 0o700))
	l, err := link.AttachTCX(link.TCXOptions{Interface: loopbackIndex, Program: classifier(t, -1), Attach: ebpf.AttachTCXIngress})
	must.Do(t, err)
	t.Cleanup(func() { l.Close() })
	pin := filepath.Join(hooks.dir, "1_ingress")
	must.Do(t, l.Pin(pin))

	free := fillDescriptors(t)
	ok, err := hooks.takeOver(hook{loopbackIndex, ingress}, pin)
	free()
	if ok || !errors.Is(err, unix.EMFILE) {
		t.Errorf("without descriptors: taken over %v, error %v, want EMFILE", ok, err)
	}
	if ok, err = hooks.takeOver(hook{loopbackIndex, ingress}, pin); !ok || err != nil {
		t.Errorf("with descriptors: taken over %v, error %v", ok, err)
	}
	hooks.close()
}

// fillDescriptors leaves the process no free file descriptor until free is called.
func fillDescriptors(t *testing.T) (free func()) {
	t.Helper()
	var was unix.Rlimit
	must.Do(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: was.Max}))
	var open []int
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		open = append(open, fd)
	}
	return func() {
		for _, fd := range open {
			_ = unix.Close(fd)
		}
		must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was))
	}
}
