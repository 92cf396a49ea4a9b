package harness

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// The test binary stands in for the lab's program and for spillway: the harness starts it
// for servers, load generators and agents.
func TestMain(m *testing.M) {
	workload.RunIfAsked()
	spillway = os.Args[0]
	if len(os.Args) > 1 && os.Args[1] == "load" {
		os.Exit(standInLoad(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		os.Stderr.WriteString("starting\nload dataplane: planted fault\n")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// standInLoad runs a short load at the target of a load command line.
func standInLoad(args []string) int {
	cfg := load.Config{Kind: load.Kind(args[0]), Target: netip.MustParseAddrPort(args[1]),
		Connections: 2, Duration: 5 * time.Second, MaxRequests: 20}
	r, err := load.Run(context.Background(), cfg)
	if err != nil || json.NewEncoder(os.Stdout).Encode(r) != nil {
		return 1
	}
	return 0
}

func needRoot(t *testing.T) {
	t.Helper()
	if err := CanRun(); err != nil {
		t.Skip(err)
	}
}

func smallSpec(name string) topology.Spec {
	s := topology.DefaultSpec(name)
	s.Nodes, s.PodsPerNode, s.Conntrack = 1, 1, true
	return s
}

func TestHarnessMeasuresAndLeavesNothing(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	r, err := Up(ctx, smallSpec("harness-a"))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Down()
	c := r.Cluster
	for _, s := range []struct {
		host *topology.Host
		kind string
		port uint16
	}{{c.Node(0), workload.HTTP, 8080}, {c.Pod(0, 0), workload.HTTP, 80}, {c.Pod(0, 0), workload.UDP, 7}} {
		if err := r.Serve(ctx, s.host, s.kind, s.port); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.RoutePods(c.Client(0)); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		kind load.Kind
		to   netip.AddrPort
		left int // at least so many conntrack entries on the node
	}{
		{load.Conn, netip.AddrPortFrom(c.Node(0).IPv4, 8080), 20},
		{load.Conn, netip.AddrPortFrom(c.Pod(0, 0).IPv6, 80), 20},
		{load.UDP, netip.AddrPortFrom(c.Pod(0, 0).IPv4, 7), 2},
		{load.HTTP, netip.AddrPortFrom(c.Pod(0, 0).IPv4, 80), 2},
	} {
		s, err := r.Measure(ctx, c.Client(0), load.Config{Kind: tt.kind, Target: tt.to, Connections: 2, Duration: time.Second})
		if err != nil {
			t.Fatalf("%s to %s: %v", tt.kind, tt.to, err)
		}
		if s.Requests != 20 || s.Failed() != 0 {
			t.Errorf("%s to %s: %d requests, errors %v", tt.kind, tt.to, s.Requests, s.Errors)
		}
		if s.Conntrack < tt.left || s.Conntrack > tt.left+8 {
			t.Errorf("%s to %s: %d conntrack entries, want about %d", tt.kind, tt.to, s.Conntrack, tt.left)
		}
	}
	// The table is emptied before each load, so only the last one's are there.
	if n, err := r.conntrack(); err != nil || n > 10 {
		t.Errorf("%d conntrack entries after the last load, want about 2 (%v)", n, err)
	}
	if _, err := Up(ctx, smallSpec("harness-a")); err == nil || !strings.Contains(err.Error(), "under way") {
		t.Errorf("a second harness of one name: error %v", err)
	}
	if err := r.Down(); err != nil {
		t.Error(err)
	}
	if err := r.Down(); err != nil {
		t.Errorf("second Down: %v", err)
	}
	checkNothingLeft(t, "harness-a")
}

func checkNothingLeft(t *testing.T, name string) {
	t.Helper()
	if found, _ := filepath.Glob("/run/netns/spw-" + name + "-*"); len(found) > 0 {
		t.Errorf("namespaces are left: %v", found)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), root+"/"+name) {
		t.Errorf("a mount is left (%v)", err)
	}
	if _, err := os.Stat(root + "/" + name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left (%v)", err)
	}
}

func TestUpRemovesWhatAKilledRunLeft(t *testing.T) {
	needRoot(t)
	const name = "harness-b"
	first, err := Up(context.Background(), smallSpec(name))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(first.Path("bpf/pinned"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := first.Serve(context.Background(), first.Cluster.Pod(0, 0), workload.UDP, 7); err != nil {
		t.Fatal(err)
	}
	first.lock.Close() // as the kernel does when a process is killed
	second, err := Up(context.Background(), smallSpec(name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(second.Path("bpf/pinned")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pinned objects of the first run are still there (%v)", err)
	}
	if pids, err := second.Cluster.Pod(0, 0).Processes(); err != nil || len(pids) > 0 {
		t.Errorf("processes %v of the first run still run (%v)", pids, err)
	}
	if err := second.Down(); err != nil {
		t.Error(err)
	}
	checkNothingLeft(t, name)
}

func TestAgentThatFailsIsReportedWithItsLastLine(t *testing.T) {
	needRoot(t)
	r, err := Up(context.Background(), smallSpec("harness-c"))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Down()
	err = r.Agent(context.Background(), r.Cluster.Node(0), r.Path("manifests"), "ebpf")
	if want := "spillway agent on node0 ended: load dataplane: planted fault"; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
	for _, want := range []string{"planted fault", "none was started"} {
		if err := r.RemoveAgent(context.Background(), r.Cluster.Node(0), "ebpf"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the agent's removal returns %v, want %q", err, want)
		}
	}
}

func TestLoadArgs(t *testing.T) {
	cfg := load.Config{Kind: load.Conn, Target: netip.MustParseAddrPort("[fd30::a]:80"), Connections: 8, Rate: 1234.5,
		Duration: 2 * time.Second, Warmup: 200 * time.Millisecond, MaxRequests: 9, Timeout: time.Second, Threads: 2, Delay: 3 * time.Millisecond,
		Sources: []netip.Addr{netip.MustParseAddr("fd30::b"), netip.MustParseAddr("fd30::c")}, FreshPorts: true}
	want := strings.Fields("conn [fd30::a]:80 --output json --connections 8 --duration 2s --warmup 200ms --rate 1234.5 " +
		"--max-requests 9 --timeout 1s --threads 2 " +
		"--delay 3ms --source fd30::b --source fd30::c --fresh-ports")
	if diff := cmp.Diff(want, loadArgs(cfg)); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
}

func TestTailKeepsTheEnd(t *testing.T) {
	var w tail
	for range 3000 {
		w.Write([]byte("line\n"))
	}
	w.Write([]byte("the last one \n\n"))
	if got := w.lastLine(); got != "the last one" || len(w.buf) > tailSize {
		t.Errorf("last line %q, %d bytes kept", got, len(w.buf))
	}
	if got := (&tail{}).lastLine(); got != "" {
		t.Errorf("of nothing: %q", got)
	}
}

func TestNeedPrograms(t *testing.T) {
	if err := NeedPrograms(map[string]string{"sh": "dash"}); err != nil {
		t.Error(err)
	}
	err := NeedPrograms(map[string]string{"no-such-program": "no-such-package"})
	want := `find programs: no no-such-program in PATH: run "apt-get install no-such-package", as root with /usr/sbin in PATH`
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestAskReadsTheAnswer(t *testing.T) {
	needRoot(t)
	r, err := Up(context.Background(), smallSpec("harness-d"))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Down()
	node := r.Cluster.Node(0)
	if _, err := agent.Get(context.Background(), node, agent.HealthPort, "/healthz"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("no agent: error %v", err)
	}
	l, err := node.Listen(context.Background(), "tcp", net.JoinHostPort("127.0.0.1", agent.HealthPort))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		conn.Read(make([]byte, 1000))
		conn.Write([]byte("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\nnot yet.\n"))
	}()
	if _, err := agent.Get(context.Background(), node, agent.HealthPort, "/healthz"); err == nil ||
		!strings.Contains(err.Error(), "503 Service Unavailable: not yet.") {
		t.Errorf("sick agent: error %v", err)
	}
}

func TestEndError(t *testing.T) {
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	if err := EndError(canceled); !strings.HasPrefix(err.Error(), "interrupted") {
		t.Errorf("canceled: %v", err)
	}
	late := errors.New("too late")
	timed, cancel := context.WithTimeoutCause(context.Background(), 0, late)
	defer cancel()
	if err := EndError(timed); err != late {
		t.Errorf("timed out: %v", err)
	}
}
