package reach

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// apiServer is a fake API server with a fake kubelet behind it: it lists Pods and nodes, and
// runs a function of the test for an exec, over WebSocket or SPDY. test/cluster has the real
// ones.
type apiServer struct {
	*httptest.Server
	namespace string // of the agents

	mu           sync.Mutex
	nodes        []string
	pods         []corev1.Pod
	exec         map[string]execFunc // by Pod
	denied       map[string]bool     // "pods" of all namespaces, "pods NAMESPACE", "nodes", "exec"
	noWebSocket  bool
	noSPDY       bool
	webSockets   atomic.Int32
	spdys        atomic.Int32
	running, max int // execs
}

// execFunc is a program in a Pod. It returns the exit code.
type execFunc func(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) int

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{namespace: usualNamespace, exec: map[string]execFunc{}, denied: map[string]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/pods", s.listPods)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods", s.listPods)
	mux.HandleFunc("GET /api/v1/nodes", s.listNodes)
	mux.HandleFunc("GET /api/v1/nodes/{name}", s.getNode)
	mux.HandleFunc("/api/v1/namespaces/{namespace}/pods/{pod}/exec", s.serveExec)
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

func (s *apiServer) cluster(t *testing.T, change func(*Config)) *Cluster {
	t.Helper()
	cfg := Config{REST: &rest.Config{Host: s.URL, QPS: -1}}
	if change != nil {
		change(&cfg)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// add adds a node with a running agent.
func (s *apiServer) add(node string, run execFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: "spillway-" + node, Labels: map[string]string{"app.kubernetes.io/name": "spillway"}}}
	pod.Spec.NodeName = node
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "agent", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	s.nodes, s.pods = append(s.nodes, node), append(s.pods, pod)
	s.exec[pod.Name] = run
}

func answer(w http.ResponseWriter, code int, object any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(object)
}

func refuse(w http.ResponseWriter, code int32, reason metav1.StatusReason, message string) {
	answer(w, int(code), metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure, Code: code, Reason: reason, Message: message,
	})
}

func (s *apiServer) isDenied(w http.ResponseWriter, what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.denied[what] {
		refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden, what+" is forbidden")
	}
	return s.denied[what]
}

func (s *apiServer) listPods(w http.ResponseWriter, r *http.Request) {
	ns := r.PathValue("namespace")
	if s.isDenied(w, strings.TrimSpace("pods "+ns)) {
		return
	}
	if got := r.URL.Query().Get("labelSelector"); got != selector {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, "selector "+got)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}}
	field := r.URL.Query().Get("fieldSelector")
	for _, p := range s.pods {
		if (ns == "" || ns == p.Namespace) && (field == "" || field == "spec.nodeName="+p.Spec.NodeName) {
			list.Items = append(list.Items, p)
		}
	}
	answer(w, http.StatusOK, list)
}

func (s *apiServer) listNodes(w http.ResponseWriter, r *http.Request) {
	if s.isDenied(w, "nodes") {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
	for _, name := range s.nodes {
		list.Items = append(list.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	answer(w, http.StatusOK, list)
}

func (s *apiServer) getNode(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range s.nodes {
		if name == r.PathValue("name") {
			answer(w, http.StatusOK, corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: name}})
			return
		}
	}
	refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound, "no such node")
}

// streams are those of an exec.
type streams struct {
	stdin                  io.Reader
	stdout, stderr, status io.Writer
	close                  func()
}

func (s *apiServer) serveExec(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if fmt.Sprint(q["command"], q["container"]) != "[spillway api-pipe] [agent]" {
		refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "another command")
		return
	}
	if s.isDenied(w, "exec") {
		return
	}
	s.mu.Lock()
	run := s.exec[r.PathValue("pod")]
	s.mu.Unlock()
	if run == nil {
		refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError, "error dialing backend: dial tcp 192.0.2.1:10250: connect: no route to host")
		return
	}
	var io streams
	if wsstream.IsWebSocketRequest(r) {
		if s.noWebSocket {
			http.Error(w, "no upgrade here", http.StatusBadGateway)
			return
		}
		s.webSockets.Add(1)
		io = webSocketStreams(w, r)
	} else {
		if s.noSPDY {
			http.Error(w, "no upgrade here", http.StatusBadGateway)
			return
		}
		s.spdys.Add(1)
		io = spdyStreams(w, r)
	}
	if io.close == nil {
		return
	}
	s.count(1)
	code := run(r.Context(), io.stdin, io.stdout, io.stderr)
	s.count(-1)
	status := metav1.Status{Status: metav1.StatusSuccess}
	if code != 0 {
		status = metav1.Status{Status: metav1.StatusFailure, Reason: remotecommand.NonZeroExitCodeReason,
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: remotecommand.ExitCodeCauseType, Message: fmt.Sprint(code)}}}}
	}
	_ = json.NewEncoder(io.status).Encode(status)
	io.close()
}

func (s *apiServer) count(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running += n
	s.max = max(s.max, s.running)
}

func webSocketStreams(w http.ResponseWriter, r *http.Request) streams {
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{remotecommand.StreamProtocolV5Name: {
		Binary:   true,
		Channels: []wsstream.ChannelType{wsstream.ReadChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.ReadChannel},
	}})
	conn.SetIdleTimeout(time.Minute)
	// The end of a connection is no error here.
	r = r.WithContext(klog.NewContext(r.Context(), logr.Discard()))
	_, c, err := conn.Open(w, r)
	if err != nil {
		return streams{}
	}
	return streams{c[0], c[1], c[2], c[3], func() { conn.Close() }}
}

func spdyStreams(w http.ResponseWriter, r *http.Request) streams {
	if _, err := httpstream.Handshake(r, w, []string{remotecommand.StreamProtocolV4Name}); err != nil {
		return streams{}
	}
	opened := make(chan httpstream.Stream, 4)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		opened <- s
		return nil
	})
	if conn == nil {
		return streams{}
	}
	byType := map[string]httpstream.Stream{}
	for len(byType) < 4 {
		s := <-opened
		byType[s.Headers().Get(corev1.StreamType)] = s
	}
	return streams{byType["stdin"], byType["stdout"], byType["stderr"], byType["error"], func() {
		for _, s := range byType {
			_ = s.Close() // the client reads to the end of each
		}
		<-conn.CloseChan()
	}}
}

// agentAPI is an agent's API that tells its node and the time of its clock.
type agentAPI struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	node  string
	ahead time.Duration
	delay chan struct{} // nil: answers at once
	watch func(context.Context, *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error
}

func (a *agentAPI) Status(ctx context.Context, _ *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	if a.delay != nil {
		select {
		case <-a.delay:
		case <-ctx.Done(): // a client sends its deadline
			return nil, ctx.Err()
		}
	}
	return &nodev1alpha1.StatusResponse{Node: a.node, Version: "0.1.0", Time: timestamppb.New(time.Now().Add(a.ahead))}, nil
}

func (a *agentAPI) WatchFlows(ctx context.Context, _ *nodev1alpha1.WatchFlowsRequest, to *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	return a.watch(ctx, to)
}

// pipeTo is api-pipe in a Pod with this API.
func pipeTo(t *testing.T, api nodev1alpha1connect.NodeServiceHandler) execFunc {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(nodev1alpha1connect.NewNodeServiceHandler(api))
	server := httptest.NewUnstartedServer(mux)
	server.Config.Protocols = &http.Protocols{} // as an agent
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	return func(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) int {
		err := Pipe(ctx, func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", server.Listener.Addr().String())
		}, stdin, stdout)
		if err != nil {
			fmt.Fprintf(stderr, "spillway: %v\n", err)
			return 1
		}
		return 0
	}
}

// failing is a program that prints a line on stderr and ends with a code.
func failing(line string, code int) execFunc {
	return func(_ context.Context, _ io.Reader, _, stderr io.Writer) int {
		fmt.Fprintln(stderr, line)
		return code
	}
}
