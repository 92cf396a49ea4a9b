package nodeclient

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
)

// status asks an agent, and returns the error as a command prints it.
func status(t *testing.T, d Dialer) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := New(d).Status(ctx, &nodev1alpha1.StatusRequest{})
	return Error("show status", d, err)
}

func wantLine(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) || strings.ContainsAny(err.Error(), "\n\x1b") {
		t.Errorf("error %q, want one line with %q", err, want)
	}
}

func TestWithoutAnAgent(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "api.sock")
	wantLine(t, status(t, Unix(path)), "show status: the agent at "+path+": no agent serves here: start it, or give its --api-socket")
	other := filepath.Join(dir, "other.sock")
	l, err := net.Listen("unix", other)
	if err != nil {
		t.Fatal(err)
	}
	wantLine(t, status(t, Unix(path)), "(this machine has "+other+")")
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	wantLine(t, status(t, Unix(other)), "no agent serves here any more: start it again")
	wantLine(t, status(t, Unix("/x\x1b[31m")), `the agent at /x\x1b[31m:`)
}

// TestTheSocketOfAnotherUser asks as another user in a child process.
func TestTheSocketOfAnotherUser(t *testing.T) {
	if path := os.Getenv("SPILLWAY_TEST_SOCKET"); path != "" {
		wantLine(t, status(t, Unix(path)), "only the user that it runs as may connect: run this command as root")
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: runs itself as another user")
	}
	dir, err := os.MkdirTemp("/tmp", "nodeclient-") // t.TempDir is in a directory of root alone
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	program := filepath.Join(dir, "test")
	text, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = errors.Join(os.WriteFile(program, text, 0o755), os.Chmod(dir, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "api.sock")
	l, err := net.Listen("unix", socket)
	if err == nil {
		err = os.Chmod(socket, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cmd := exec.Command(program, "-test.run", "^TestTheSocketOfAnotherUser$", "-test.v")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "SPILLWAY_TEST_SOCKET="+socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("as another user: %v\n%s", err, out)
	}
}

// answering is an agent with one answer.
type answering struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	err error
}

func (a answering) Status(ctx context.Context, _ *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	if a.err == nil {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return nil, a.err
}

func TestAnswersThatAreErrors(t *testing.T) {
	for want, err := range map[string]error{
		"does not answer in time: try again": nil,
		"no such thing":                      connect.NewError(connect.CodeNotFound, errors.New("no such thing")),
		`bad \x1b[31m\nname`:                 connect.NewError(connect.CodeInternal, errors.New("bad \x1b[31m\nname")),
		"does not offer this: it is older than this program, or it serves w": connect.NewError(connect.CodeUnimplemented, errors.New("x")),
	} {
		wantLine(t, status(t, Unix(nodeclienttest.Serve(t, answering{err: err}))), want)
	}
	if Error("x", Unix("socket"), nil) != nil {
		t.Error("no error is an error")
	}
}

// TestAnotherProgramOnTheSocket answers as no agent does.
func TestAnotherProgramOnTheSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("220 smtp\x1b[31m\r\n"))
			conn.Close()
		}
	}()
	wantLine(t, status(t, Unix(path)), "show status: the agent at "+path)
}

func TestSocketFlag(t *testing.T) {
	var s Socket
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	s.AddFlag(f)
	dir := t.TempDir()
	before := sockets
	defer func() { sockets = before }()
	sockets = []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	if d := s.Dialer(); d.Where != "the agent at "+DefaultSocket {
		t.Errorf("without a socket: %s", d.Where)
	}
	if err := os.WriteFile(sockets[1], nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if d := s.Dialer(); d.Where != "the agent at "+sockets[1] {
		t.Errorf("in a container of kubectl debug: %s", d.Where)
	}
	if err := f.Parse([]string{"--api-socket", "/x"}); err != nil {
		t.Fatal(err)
	}
	if d := s.Dialer(); d.Where != "the agent at /x" {
		t.Errorf("with the flag: %s", d.Where)
	}
}

func TestTextsForPeople(t *testing.T) {
	now := timestamppb.Now()
	for d, want := range map[time.Duration]string{
		-time.Minute: "0s", 0: "0s", 1500 * time.Millisecond: "1s", 61 * time.Second: "1m1s",
		90*time.Minute + 5*time.Second: "1h30m", 71 * time.Hour: "2d",
	} {
		if got := Age(now, timestamppb.New(now.AsTime().Add(-d))); got != want {
			t.Errorf("Age of %v is %q, want %q", d, got, want)
		}
	}
	if Age(nil, now)+Age(now, nil) != "" {
		t.Error("an unknown time has an age")
	}
	if p := Protocol(nodev1alpha1.Protocol_PROTOCOL_SCTP); p != "SCTP" {
		t.Error(p)
	}
	service := &nodev1alpha1.Service{Ports: []*nodev1alpha1.ServicePort{{Frontends: []*nodev1alpha1.Frontend{{Address: "x"}}}}}
	resp := &nodev1alpha1.GetServiceResponse{Service: service}
	if NewerAgent(resp) != "" {
		t.Error("an agent of this version is newer")
	}
	nodeclienttest.Newer(service.Ports[0].Frontends[0])
	if NewerAgent(resp) == "" {
		t.Error("an unknown field deep in a message is not seen")
	}
}
