package files

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

func TestMain(m *testing.M) { harness.Main(m, 0) }

// files is a cluster with running agents, masqueraded as by flannel, whose pods
// serve files out of one directory.
type files struct {
	*harness.Harness
	dir string // what servers serve, and where they put what they are given
	out string // where clients put what they get
}

func start(t *testing.T, name string, flags ...string) *files {
	t.Helper()
	spec := topology.DefaultSpec(name)
	spec.Masquerade, spec.Clients = true, 2
	h := harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{"": flags}})
	return &files{Harness: h, dir: shared(t), out: shared(t)}
}

// shared makes a directory in which servers that run as another user may write.
func shared(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "spillway-files-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	pub := filepath.Join(dir, pub) // vsftpd serves no directory that all may write
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(pub, 0o777), os.Chmod(pub, 0o777)); err != nil {
		t.Fatal(err)
	}
	return pub
}

const pub = "pub"

// program finds a program of a Debian package; hack/deps unpacks, and does not
// install, what conflicts with another.
func program(t *testing.T, name, pkg string) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	unpacked := filepath.Join(cache, "spillway/unpacked", pkg, "usr/sbin", name)
	if _, err := os.Stat(unpacked); err == nil {
		return unpacked
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%s is missing: run hack/deps test (package %s)", name, pkg)
	}
	return path
}

// service is a NodePort Service of one port.
func service(name string, proto corev1.Protocol, port int32, endpoints ...string) flows.Service {
	return flows.Service{
		Name: name, Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(endpoints...),
		Ports: []flows.Port{{Name: "port", Protocol: proto, Port: port, Target: port}},
	}
}

// address is the address of a target.
func address(t *testing.T, s *suite.File, to flows.Target, combo flows.Combo) netip.AddrPort {
	t.Helper()
	return netip.MustParseAddrPort(s.MustAddress(t, to, combo))
}

// content is a file of a size, the same for the same name.
func content(name string, size int) []byte {
	var seed [32]byte
	copy(seed[:], name)
	b := make([]byte, size)
	_, _ = rand.NewChaCha8(seed).Read(b)
	return b
}

// offer puts a file where servers find it.
func (h *files) offer(t *testing.T, name string, size int) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(h.dir, name), content(name, size), 0o666); err != nil {
		t.Fatal(err)
	}
}

// want fails unless a file has arrived as it was; it then takes it away. A server
// may write the end of what it has acknowledged a moment later.
func want(t *testing.T, what, path, name string, size int) bool {
	t.Helper()
	var got []byte
	if err := await.Error(func() (err error) {
		if got, err = os.ReadFile(path); err == nil && len(got) != size {
			err = fmt.Errorf("%d bytes have arrived, want %d", len(got), size)
		}
		return err
	}); err != nil {
		t.Errorf("%s: %v", what, err)
		return false
	}
	_ = os.Remove(path)
	if sha256.Sum256(got) != sha256.Sum256(content(name, size)) {
		t.Errorf("%s: %d bytes arrived, which are not the %d that were sent", what, len(got), size)
		return false
	}
	return true
}

// patience limits a client: without an answer it would retry for longer. A large file has 68,000 blocks,
// each of which waits for the client and for the server to run.
const (
	patience      = 12 * time.Second
	largePatience = 10 * time.Minute
)

// client runs a client on a host and returns what it said.
func (h *files) client(ctx context.Context, host string, argv ...string) (string, error) {
	machine, err := h.Host(host)
	if err != nil {
		return "", err
	}
	limit := patience
	if !testing.Short() {
		limit = largePatience
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := machine.Command(ctx, argv...)
	cmd.WaitDelay = time.Second
	cmd.Dir = h.out
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = errors.New("it did not end")
	}
	return string(bytes.TrimSpace(out)), err
}

// tftpClient is a program that gets and puts files.
type tftpClient struct {
	name     string
	get, put func(server netip.AddrPort, remote, local string, options ...string) []string
}

func port(a netip.AddrPort) string { return strconv.Itoa(int(a.Port())) }

func tftpURL(a netip.AddrPort, name string) string {
	return "tftp://" + net.JoinHostPort(a.Addr().String(), port(a)) + "/" + name
}

var tftpClients = []tftpClient{
	{
		name: "tftp-hpa",
		get: func(a netip.AddrPort, remote, local string, _ ...string) []string {
			return []string{"tftp", "-m", "binary", a.Addr().String(), port(a), "-c", "get", remote, local}
		},
		put: func(a netip.AddrPort, remote, local string, _ ...string) []string {
			return []string{"tftp", "-m", "binary", a.Addr().String(), port(a), "-c", "put", local, remote}
		},
	},
	{
		name: "atftp",
		get: func(a netip.AddrPort, remote, local string, options ...string) []string {
			return append(append([]string{"atftp", "--get", "-r", remote, "-l", local}, options...), a.Addr().String(), port(a))
		},
		put: func(a netip.AddrPort, remote, local string, options ...string) []string {
			return append(append([]string{"atftp", "--put", "-r", remote, "-l", local}, options...), a.Addr().String(), port(a))
		},
	},
	{
		name: "curl",
		get: func(a netip.AddrPort, remote, local string, options ...string) []string {
			return append(append([]string{"curl", "-sS", "-o", local}, options...), tftpURL(a, remote))
		},
		put: func(a netip.AddrPort, remote, local string, options ...string) []string {
			return append(append([]string{"curl", "-sS", "-T", local}, options...), tftpURL(a, remote))
		},
	},
}
