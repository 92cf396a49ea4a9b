package reach

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
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
	sets         []appsv1.DaemonSet
	revisions    []appsv1.ControllerRevision
	bindings     []rbacv1.ClusterRoleBinding
	exec         map[string]execFunc // by Pod
	command      func(node string, args []string, stdin io.Reader, stdout, stderr io.Writer) int
	denied       map[string]bool // "RESOURCE NAMESPACE", "nodes", "clusterrolebindings", "exec"
	pages        int             // answers that were not the last of their list
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
	s := &apiServer{namespace: UsualNamespace, exec: map[string]execFunc{}, denied: map[string]bool{"clusterrolebindings": true}}
	s.sets = []appsv1.DaemonSet{daemonSet(s.namespace, "spillway:2")}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods", s.listPods)
	mux.HandleFunc("GET /api/v1/nodes", s.listNodes)
	mux.HandleFunc("GET /apis/apps/v1/namespaces/{namespace}/daemonsets", func(w http.ResponseWriter, r *http.Request) {
		listed(s, w, r, "daemonsets", "apps/v1", "DaemonSetList", s.sets)
	})
	mux.HandleFunc("GET /apis/apps/v1/namespaces/{namespace}/controllerrevisions", func(w http.ResponseWriter, r *http.Request) {
		listed(s, w, r, "controllerrevisions", "apps/v1", "ControllerRevisionList", s.revisions)
	})
	mux.HandleFunc("GET /apis/rbac.authorization.k8s.io/v1/clusterrolebindings", func(w http.ResponseWriter, r *http.Request) {
		listed(s, w, r, "clusterrolebindings", "rbac.authorization.k8s.io/v1", "ClusterRoleBindingList", s.bindings)
	})
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

// agentLabels are those of the chart.
var agentLabels = map[string]string{"app.kubernetes.io/name": "spillway"}

// daemonSet returns one of agents, as the chart renders it.
func daemonSet(namespace, image string) appsv1.DaemonSet {
	return appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "spillway", UID: types.UID("set-in-" + namespace), Labels: agentLabels},
		Spec: appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: agentLabels},
			Spec: corev1.PodSpec{HostNetwork: true, ServiceAccountName: "spillway", Containers: []corev1.Container{
				{Name: "agent", Image: image, ImagePullPolicy: corev1.PullNever},
			}},
		}},
	}
}

// podOf returns a running Pod of a DaemonSet, as its controller creates it.
func podOf(set appsv1.DaemonSet, node string) corev1.Pod {
	pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: set.Namespace, Name: set.Name + "-" + node, Labels: set.Spec.Template.Labels,
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(&set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))},
	}}
	set.Spec.Template.Spec.DeepCopyInto(&pod.Spec)
	pod.Spec.NodeName = node
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "agent",
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	return pod
}

// add adds a node with a running agent.
func (s *apiServer) add(node string, run execFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pod := podOf(s.sets[0], node)
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
	s.mu.Lock()
	pods := slices.Clone(s.pods)
	s.mu.Unlock()
	if field := r.URL.Query().Get("fieldSelector"); field != "" {
		pods = slices.DeleteFunc(pods, func(p corev1.Pod) bool { return field != "spec.nodeName="+p.Spec.NodeName })
	}
	listed(s, w, r, "pods", "v1", "PodList", pods)
}

func (s *apiServer) listNodes(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	var nodes []corev1.Node
	for _, name := range s.nodes {
		nodes = append(nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelOSStable: "linux"}}})
	}
	s.mu.Unlock()
	listed(s, w, r, "nodes", "v1", "NodeList", nodes)
}

// listed answers with the objects of a namespace that a selector selects, page by page.
func listed[T any, P interface {
	*T
	metav1.Object
}](s *apiServer, w http.ResponseWriter, r *http.Request, resource, version, kind string, all []T) {
	namespace, query := r.PathValue("namespace"), r.URL.Query()
	if s.isDenied(w, strings.TrimSpace(resource+" "+namespace)) {
		return
	}
	selected, err := labels.Parse(query.Get("labelSelector"))
	if err != nil {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	all = slices.DeleteFunc(slices.Clone(all), func(o T) bool {
		return namespace != P(&o).GetNamespace() || !selected.Matches(labels.Set(P(&o).GetLabels()))
	})
	from, _ := strconv.Atoi(query.Get("continue"))
	limit, _ := strconv.Atoi(query.Get("limit"))
	meta := metav1.ListMeta{}
	items := all[from:]
	if limit > 0 && len(items) > limit {
		items, meta.Continue = items[:limit], strconv.Itoa(from+limit)
		s.mu.Lock()
		s.pages++
		s.mu.Unlock()
	}
	answer(w, http.StatusOK, map[string]any{"apiVersion": version, "kind": kind, "metadata": meta, "items": items})
}

func (s *apiServer) getNode(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range s.nodes {
		if name == r.PathValue("name") {
			answer(w, http.StatusOK, corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"},
				ObjectMeta: metav1.ObjectMeta{Name: name}})
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
	s.mu.Lock()
	run, command := s.exec[r.PathValue("pod")], s.command
	s.mu.Unlock()
	switch args := q["command"]; {
	case slices.Equal(args, []string{"spillway", "api-pipe"}) && q.Get("container") == "agent":
	case len(args) > 2 && args[1] == ForClient && command != nil:
		run = func(_ context.Context, stdin io.Reader, stdout, stderr io.Writer) int {
			return command(strings.TrimPrefix(r.PathValue("pod"), "spillway-"), args[2:], stdin, stdout, stderr)
		}
	default:
		refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden, "another command")
		return
	}
	if s.isDenied(w, "exec") {
		return
	}
	if run == nil {
		refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError,
			"error dialing backend: dial tcp 192.0.2.1:10250: connect: no route to host")
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
		Binary: true,
		Channels: []wsstream.ChannelType{wsstream.ReadChannel, wsstream.WriteChannel, wsstream.WriteChannel,
			wsstream.WriteChannel, wsstream.ReadChannel},
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

func (a *agentAPI) WatchFlows(ctx context.Context, _ *nodev1alpha1.WatchFlowsRequest,
	to *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
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
