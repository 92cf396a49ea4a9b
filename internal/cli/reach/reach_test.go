package reach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/test/await"
)

// status asks an agent for its state, and measures its clock.
func status(ctx context.Context, d nodeclient.Dialer) (*nodev1alpha1.StatusResponse, error) {
	return nodeclient.New(d).Status(ctx, &nodev1alpha1.StatusRequest{})
}

func agents(t *testing.T, c *Cluster) []Agent {
	t.Helper()
	list, complete, err := c.Agents(t.Context())
	if err != nil || !complete {
		t.Fatalf("agents: complete %v, %v", complete, err)
	}
	return list
}

func TestFiftyNodesAnswer(t *testing.T) {
	const nodes, atOnce = 50, 7
	s := newAPIServer(t)
	// Each batch waits until all that may be asked at once are.
	asked := make(chan struct{}, nodes)
	gate := make(chan struct{})
	for i := range nodes {
		name := fmt.Sprintf("node%02d", i)
		run := pipeTo(t, &agentAPI{node: name, delay: gate})
		s.add(name, func(ctx context.Context, in io.Reader, out, errs io.Writer) int {
			asked <- struct{}{}
			return run(ctx, in, out, errs)
		})
	}
	go func() {
		for range atOnce {
			<-asked
		}
		close(gate)
	}()
	c := s.cluster(t, func(cfg *Config) { cfg.AtOnce, cfg.Timeout = atOnce, time.Minute })
	results := Each(t.Context(), c, agents(t, c), status)
	if len(results) != nodes {
		t.Fatalf("%d results", len(results))
	}
	for i, r := range results {
		if want := fmt.Sprintf("node%02d", i); r.Err != nil || r.Agent.Node != want || r.Value.Node != want {
			t.Errorf("%s: node %q, %v", want, r.Value.GetNode(), r.Err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// The end of an exec reaches the server a little later than the client.
	if s.max < atOnce || s.max > 2*atOnce {
		t.Errorf("%d nodes were asked at once, want %d", s.max, atOnce)
	}
	if got := s.webSockets.Load(); got != nodes || s.spdys.Load() != 0 {
		t.Errorf("%d WebSockets and %d SPDYs, want one WebSocket for each node", got, s.spdys.Load())
	}
}

func TestEachNodeHasItsResult(t *testing.T) {
	s := newAPIServer(t)
	s.add("good", pipeTo(t, &agentAPI{node: "good"}))
	s.add("hostile", failing("spillway: \x1b[31mred\x07", 1))
	s.add("no-api", failing("spillway: connect to the agent at /run/spillway/api.sock: no agent serves here", 1))
	s.add("old", failing("spillway: unknown command \"api-pipe\"", 2))
	s.add("other-image", func(_ context.Context, _ io.Reader, stdout, _ io.Writer) int {
		fmt.Fprintln(stdout, "hello there")
		return 0
	})
	s.add("silent", func(ctx context.Context, stdin io.Reader, _, _ io.Writer) int {
		_, _ = io.Copy(io.Discard, stdin)
		return 0
	})
	s.add("slow", pipeTo(t, &agentAPI{delay: make(chan struct{})}))
	s.add("stopped", nil)
	s.add("unreachable", nil)
	s.mu.Lock()
	s.nodes = append(s.nodes, "without")
	for i := range s.pods {
		if s.pods[i].Spec.NodeName == "stopped" {
			s.pods[i].Status.ContainerStatuses[0].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}
		}
	}
	s.mu.Unlock()
	c := s.cluster(t, func(cfg *Config) { cfg.Timeout = 3 * time.Second })
	want := map[string]struct {
		reason Reason
		says   string
	}{
		"good":        {},
		"hostile":     {NoAPI, `\x1b[31mred\a`},
		"no-api":      {NoAPI, "connect to the agent at /run/spillway/api.sock: no agent serves here"},
		"old":         {TooOld, "older than this program"},
		"other-image": {TooOld, "not Spillway's"},
		"silent":      {NoAnswer, "does not answer within 3s"},
		// The agent knows the deadline, too, and may say that it has passed first.
		"slow":        {NoAnswer, "does not answer"},
		"stopped":     {NotRunning, "kubectl -n kube-system describe pod spillway-stopped"},
		"unreachable": {NoAnswer, "no route to host"},
		"without":     {NoAgent, "no agent runs on this node"},
	}
	results := Each(t.Context(), c, agents(t, c), status)
	if len(results) != len(want) {
		t.Errorf("%d results, want %d", len(results), len(want))
	}
	for _, r := range results {
		w, got := want[r.Agent.Node], r.Err
		if got == nil {
			got = &Error{}
		}
		if got.Reason != w.reason || !strings.Contains(got.Error(), w.says) || strings.ContainsAny(got.Error(), "\n\x1b") {
			t.Errorf("%s: %s %q, want %s %q", r.Agent.Node, got.Reason, got, w.reason, w.says)
		}
	}
}

// An agent of another version may lack a method, and the error of one node, as a command
// shows it, names no word twice.
func TestOneNode(t *testing.T) {
	s := newAPIServer(t)
	s.add("node1", pipeTo(t, &agentAPI{node: "node1"}))
	s.add("old", failing("spillway: unknown command", 2))
	s.mu.Lock()
	s.nodes = append(s.nodes, "empty")
	s.mu.Unlock()
	c := s.cluster(t, nil)
	if r, err := status(t.Context(), c.Node("node1")); err != nil || r.Node != "node1" {
		t.Errorf("node1: %v, %v", r, err)
	}
	_, err := nodeclient.New(c.Node("node1")).Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if e := Explain(t.Context(), err); e == nil || e.Reason != TooOld {
		t.Errorf("a method that the agent lacks: %v", e)
	}
	for node, want := range map[string]string{
		"old": "show status: the agent of node old: its agent is older than this program, and has no api-pipe: upgrade it, or use " +
			"'kubectl exec' with the commands that it has",
		"empty":   "show status: the agent of node empty: no agent runs on this node",
		"nowhere": `show status: the agent of node nowhere: the cluster has no node "nowhere": see 'kubectl get nodes'`,
	} {
		d := c.Node(node)
		_, err := status(t.Context(), d)
		if got := nodeclient.Error("show status", d, err); got == nil || got.Error() != want {
			t.Errorf("%s: %v\nwant %s", node, got, want)
		}
	}
}

func TestRightsThatAreMissing(t *testing.T) {
	for denied, want := range map[string]string{
		"pods kube-system": "you may not list pods in namespace kube-system: bind the Role spillway-viewer of that namespace, from " +
			"this version's chart",
		"daemonsets kube-system": "you may not list daemonsets in namespace kube-system: bind the Role spillway-viewer of that namespace, " +
			"from this version's chart",
	} {
		for given, end := range map[string]string{"": ", or name another with --agent-namespace", "kube-system": ""} {
			s := newAPIServer(t)
			s.add("node1", pipeTo(t, &agentAPI{node: "node1"}))
			s.denied[denied] = true
			cluster := s.cluster(t, func(cfg *Config) { cfg.Namespace = given })
			list, _, err := cluster.Agents(t.Context())
			if e := Explain(t.Context(), err); len(list) != 0 || e == nil || e.Reason != Forbidden || e.Error() != want+end {
				t.Errorf("%v, %v, want %q", list, err, want+end)
			}
		}
	}
	s := newAPIServer(t)
	s.add("node1", pipeTo(t, &agentAPI{node: "node1"}))
	s.denied["nodes"] = true
	c := s.cluster(t, nil)
	if list, complete, err := c.Agents(t.Context()); err != nil || complete || len(list) != 1 {
		t.Errorf("without the right to list nodes: %v, complete %v, %v", list, complete, err)
	}
	s.mu.Lock()
	s.denied["exec"] = true
	s.mu.Unlock()
	_, err := status(t.Context(), c.Node("node1"))
	if e := Explain(t.Context(), err); e == nil || e.Reason != Forbidden ||
		!strings.Contains(e.Error(), "pods/exec in namespace kube-system") {
		t.Errorf("without the right to exec: %v", e)
	}
}

func TestSPDYIsTheFallback(t *testing.T) {
	s := newAPIServer(t)
	s.noWebSocket = true
	s.add("node1", pipeTo(t, &agentAPI{node: "node1"}))
	if r, err := status(t.Context(), s.cluster(t, nil).Node("node1")); err != nil || r.Node != "node1" || s.spdys.Load() != 1 {
		t.Errorf("%v, %v, %d connections", r, err, s.spdys.Load())
	}
	s.noSPDY = true
	_, err := status(t.Context(), s.cluster(t, nil).Node("node1"))
	if e := Explain(t.Context(), err); e == nil || e.Reason != Failed || strings.Contains(e.Error(), "\n") {
		t.Errorf("without either: %v", e)
	}
}

// A restart leaves the Pod of the agent before it for a while.
func TestTheRunningPodIsAsked(t *testing.T) {
	pod := func(name string, age time.Duration, running bool) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Now().Add(-age))}}
		p.Spec.NodeName = "n"
		state := corev1.ContainerState{}
		if running {
			state.Running = &corev1.ContainerStateRunning{}
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "agent", State: state}}
		return p
	}
	for _, c := range []struct {
		pods []*corev1.Pod
		want string
		runs bool
	}{
		{[]*corev1.Pod{pod("a", time.Hour, false), pod("b", 2*time.Hour, true)}, "b", true},
		{[]*corev1.Pod{pod("b", 2*time.Hour, true), pod("a", time.Hour, true)}, "a", true},
		{[]*corev1.Pod{pod("b", 2*time.Hour, false), pod("a", time.Hour, false)}, "a", false},
		{nil, "", false},
	} {
		if got := (&Pods{Agents: c.pods}).choose("n"); got.Pod != c.want || (got.Err == nil) != c.runs {
			t.Errorf("%v, want %s, runs: %v", got, c.want, c.runs)
		}
	}
}

// A Pod may end between the list and the exec.
func TestAnAgentThatHasJustEnded(t *testing.T) {
	for _, c := range []struct {
		name string
		then func(*apiServer)
		want string
	}{
		{"is not there any more", func(s *apiServer) { s.pods = nil }, "no agent runs on this node"},
		{"has a successor", func(s *apiServer) { s.pods[0].Name = "spillway-next" }, "its agent was replaced a moment ago: try again"},
		{"is as it was", func(*apiServer) {}, "unable to upgrade connection"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newAPIServer(t)
			s.add("node1", pipeTo(t, &agentAPI{}))
			s.noWebSocket, s.noSPDY = true, true // the kubelet's error has no Status either
			cluster := s.cluster(t, nil)
			list := agents(t, cluster)
			s.mu.Lock()
			c.then(s)
			s.mu.Unlock()
			r := Each(t.Context(), cluster, list, status)[0]
			if r.Err == nil || !strings.Contains(r.Err.Error(), c.want) {
				t.Errorf("%v, want %q", r.Err, c.want)
			}
		})
	}
}

// echo answers each byte, and "end" when the client has closed its half.
func echo(_ context.Context, stdin io.Reader, stdout, _ io.Writer) int {
	_, _ = io.WriteString(stdout, greeting)
	_, _ = io.Copy(stdout, stdin)
	_, _ = io.WriteString(stdout, "end")
	return 0
}

func dial(t *testing.T, run execFunc, spdy bool) net.Conn {
	t.Helper()
	s := newAPIServer(t)
	s.noWebSocket = spdy
	s.add("node1", run)
	ctx, cancel := context.WithCancel(t.Context())
	c, err := s.cluster(t, nil).Node("node1").Dial(ctx)
	cancel() // the connection stays
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestAConnectionBehavesAsOne(t *testing.T) {
	for _, spdy := range []bool{false, true} {
		t.Run(fmt.Sprintf("spdy %v", spdy), func(t *testing.T) {
			c := dial(t, echo, spdy)
			large := strings.Repeat("0123456789abcdef", 64<<10) // more than any buffer
			go func() { _, _ = io.WriteString(c, large) }()
			got := make([]byte, len(large))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != large {
				t.Fatalf("%d bytes came back: %v", len(got), err)
			}

			if err := c.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(got); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("read after the deadline: %v", err)
			}
			if err := c.SetDeadline(time.Time{}); err != nil {
				t.Fatal(err)
			}

			if err := c.(*conn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			rest, err := io.ReadAll(c)
			if err != nil || string(rest) != "end" {
				t.Errorf("after half is closed: %q, %v", rest, err)
			}
			c.Close()
			if _, err := c.Read(got); !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("read after close: %v", err)
			}
			if _, err := c.Write(got); !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("write after close: %v", err)
			}
		})
	}
}

// A program that dies is no end of the stream: HTTP would take a cut response for a whole one.
func TestAnExecThatIsCutOffIsAnError(t *testing.T) {
	c := dial(t, func(_ context.Context, _ io.Reader, stdout, _ io.Writer) int {
		_, _ = io.WriteString(stdout, greeting+"half")
		return 137
	}, false)
	got, err := io.ReadAll(c)
	if string(got) != "half" || err == nil || !strings.Contains(err.Error(), "137") {
		t.Errorf("%q, %v", got, err)
	}
}

func TestCloseEndsTheExec(t *testing.T) {
	before := runtime.NumGoroutine()
	ended := make(chan struct{})
	c := dial(t, func(_ context.Context, stdin io.Reader, stdout, _ io.Writer) int {
		_, _ = io.WriteString(stdout, greeting)
		_, _ = io.Copy(io.Discard, stdin)
		for err := error(nil); err == nil; { // as an agent that does not notice
			_, err = stdout.Write(make([]byte, 64<<10))
		}
		close(ended)
		return 0
	}, false)
	c.Close()
	select {
	case <-ended:
	case <-time.After(await.Limit):
		t.Fatal("the program in the Pod still runs")
	}
	await.True(t, "the connection's goroutines have ended", func() bool { return runtime.NumGoroutine() <= before+4 }) // of the server
}

func TestFollowConnectsAgain(t *testing.T) {
	s := newAPIServer(t)
	var asked atomic.Int32
	api := &agentAPI{node: "node1", watch: func(ctx context.Context, to *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
		if err := to.Send(&nodev1alpha1.WatchFlowsResponse{Missed: uint64(asked.Add(1))}); err != nil {
			return err
		}
		if asked.Load() == 1 {
			return connect.NewError(connect.CodeUnavailable, errors.New("the agent stops"))
		}
		<-ctx.Done()
		return nil
	}}
	s.add("node1", pipeTo(t, api))
	ctx, cancel := context.WithCancel(t.Context())
	var lost []string
	var got []uint64
	s.cluster(t, nil).Follow(ctx, "node1", func(ctx context.Context, d nodeclient.Dialer, connected func()) error {
		stream, err := nodeclient.New(d).WatchFlows(ctx, &nodev1alpha1.WatchFlowsRequest{})
		if err != nil {
			return err
		}
		defer stream.Close()
		for stream.Receive() {
			connected()
			if got = append(got, stream.Msg().Missed); len(got) == 2 {
				cancel()
			}
		}
		return stream.Err()
	}, func(err *Error) { lost = append(lost, err.Error()) })
	if fmt.Sprint(got, lost) != "[1 2] [the agent stops]" {
		t.Errorf("%v, %q", got, lost)
	}
}

func TestClocksAreCompared(t *testing.T) {
	s := newAPIServer(t)
	for i, ahead := range []time.Duration{0, 30 * time.Millisecond, -time.Hour, 0, 5 * time.Second} {
		name := fmt.Sprintf("node%d", i)
		s.add(name, pipeTo(t, &agentAPI{node: name, ahead: ahead}))
	}
	c := s.cluster(t, func(cfg *Config) { cfg.Timeout = time.Minute })
	var clocks []Clock
	for _, r := range Each(t.Context(), c, agents(t, c), func(ctx context.Context, d nodeclient.Dialer) (Clock, error) {
		ctx, trip := Timed(ctx)
		resp, err := status(ctx, d)
		return trip.Clock(resp.GetTime().AsTime()), err
	}) {
		if r.Err != nil || r.Value.Error < 0 || r.Value.Error > time.Minute {
			t.Fatalf("%s: %v, %v", r.Agent.Node, r.Value, r.Err)
		}
		clocks = append(clocks, r.Value)
	}
	nodes, _ := Skews(clocks)
	for i, want := range []time.Duration{0, 0, -time.Hour, 0, 5 * time.Second} {
		if got := nodes[i]; (got-want).Abs() > clocks[i].Error+time.Second || (want == 0) != (got == 0) {
			t.Errorf("node%d is %s ahead, want about %s", i, got, want)
		}
	}
}

func TestSkews(t *testing.T) {
	ms := time.Millisecond
	for _, c := range []struct {
		name   string
		clocks []Clock
		want   string
		own    time.Duration
	}{
		{"none", nil, "[]", 0},
		{"one", []Clock{{0, ms}}, "[0s]", 0},
		{"this machine's is behind all", []Clock{{5 * time.Second, ms}, {5*time.Second + 3*ms, ms}}, "[0s 0s]", -5 * time.Second},
		{"within the round trip", []Clock{{0, ms}, {0, ms}, {2 * time.Second, 1500 * ms}}, "[0s 0s 0s]", 0},
		{"beyond it", []Clock{{0, ms}, {0, ms}, {-2 * time.Second, 100 * ms}}, "[0s 0s -2s]", 0},
	} {
		if nodes, own := Skews(c.clocks); fmt.Sprint(nodes) != c.want || own != c.own {
			t.Errorf("%s: %v, %s, want %s, %s", c.name, nodes, own, c.want, c.own)
		}
	}
}
