package listwatch

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"spillway.dev/spillway/test/await"
)

var encodings = []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf}

func service(name, clusterIP string, labels map[string]string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: labels},
		Spec: corev1.ServiceSpec{ClusterIP: clusterIP, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}}}
}

func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

func newServer(t *testing.T, objects ...runtime.Object) *Server {
	t.Helper()
	s, err := New(objects...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func apply(t *testing.T, s *Server, o runtime.Object) {
	t.Helper()
	if err := s.Apply(o); err != nil {
		t.Fatal(err)
	}
}

// start serves on an address, "" for any, until the test or stop ends it.
func start(t *testing.T, s *Server, addr string) (at string, stop func()) {
	t.Helper()
	h := httptest.NewUnstartedServer(s)
	if addr != "" {
		h.Listener.Close()
		var err error
		if h.Listener, err = net.Listen("tcp", addr); err != nil {
			t.Fatal(err)
		}
	}
	h.Start()
	stop = func() {
		h.Listener.Close() // an informer that connects again would keep Close waiting for minutes
		h.CloseClientConnections()
		h.Close()
	}
	t.Cleanup(stop)
	return h.Listener.Addr().String(), stop
}

func client(t *testing.T, addr, encoding string) kubernetes.Interface {
	t.Helper()
	c, err := kubernetes.NewForConfig(&rest.Config{Host: "http://" + addr, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: encoding}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// forEncodings runs a test with a client of each encoding and a server of its own.
func forEncodings(t *testing.T, test func(t *testing.T, s *Server, c kubernetes.Interface)) {
	for _, encoding := range encodings {
		t.Run(encoding, func(t *testing.T) {
			s := newServer(t, node("a"), service("web", "10.96.0.1", nil),
				service("headless", "None", nil), service("other", "10.96.0.2", map[string]string{"proxy": "other"}))
			addr, _ := start(t, s, "")
			test(t, s, client(t, addr, encoding))
		})
	}
}

func TestListSelects(t *testing.T) {
	forEncodings(t, func(t *testing.T, _ *Server, c kubernetes.Interface) {
		for _, tt := range []struct {
			namespace, labels, fields string
			want                      []string
		}{
			{"", "", "", []string{"headless", "other", "web"}},
			{"shop", "!proxy", "", []string{"headless", "web"}},
			{"", "", "spec.clusterIP!=None", []string{"other", "web"}},
			{"", "!proxy", "spec.clusterIP!=None", []string{"web"}},
			{"", "", "metadata.name=web", []string{"web"}},
			{"elsewhere", "", "", nil},
		} {
			list, err := c.CoreV1().Services(tt.namespace).List(t.Context(),
				metav1.ListOptions{LabelSelector: tt.labels, FieldSelector: tt.fields, Limit: 1})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range list.Items {
				got = append(got, s.Name)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || list.ResourceVersion == "" || list.Continue != "" {
				t.Errorf("%+v: version %q, continue %q, names (-want +got):\n%s", tt, list.ResourceVersion, list.Continue, diff)
			}
		}
		n, err := c.CoreV1().Nodes().Get(t.Context(), "a", metav1.GetOptions{})
		if err != nil || n.Name != "a" || n.ResourceVersion == "" {
			t.Errorf("node is %v, error %v", n, err)
		}
		empty, err := c.NetworkingV1().NetworkPolicies("").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(empty.Items) > 0 {
			t.Errorf("a kind without objects: %v, %v", empty, err)
		}
	})
}

// next returns an event as "TYPE name annotation".
func next(t *testing.T, w watch.Interface) string {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			return "end"
		}
		o, is := e.Object.(*corev1.Service)
		if !is {
			t.Fatalf("%s of a %T: %v", e.Type, e.Object, e.Object)
		}
		if o.ResourceVersion == "" {
			t.Errorf("%s %s has no version", e.Type, o.Name)
		}
		return string(e.Type) + " " + o.Name + o.Annotations[metav1.InitialEventsAnnotationKey]
	case <-time.After(await.Limit):
		t.Fatal("no event")
	}
	return ""
}

func want(t *testing.T, w watch.Interface, events ...string) {
	t.Helper()
	for _, e := range events {
		if got := next(t, w); got != e {
			t.Fatalf("event is %q, want %q", got, e)
		}
	}
}

// A change may bring an object into a selection or out of it.
func TestWatchFollowsASelection(t *testing.T) {
	forEncodings(t, func(t *testing.T, s *Server, c kubernetes.Interface) {
		selected := metav1.ListOptions{LabelSelector: "!proxy", FieldSelector: "spec.clusterIP!=None"}
		list, err := c.CoreV1().Services("").List(t.Context(), selected)
		if err != nil {
			t.Fatal(err)
		}
		apply(t, s, service("early", "10.96.0.3", nil)) // between list and watch
		selected.ResourceVersion = list.ResourceVersion
		w, err := c.CoreV1().Services("").Watch(t.Context(), selected)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		for _, o := range []runtime.Object{
			service("web", "10.96.0.9", nil),
			service("headless", "None", map[string]string{"still": "headless"}),
			service("other", "10.96.0.2", nil),
			service("web", "10.96.0.9", map[string]string{"proxy": "other"}),
			node("b"),
		} {
			apply(t, s, o)
		}
		if err := s.Delete(service("other", "", nil)); err != nil {
			t.Fatal(err)
		}
		want(t, w, "ADDED early", "MODIFIED web", "ADDED other", "DELETED web", "DELETED other")
	})
}

func TestWatchBeginsWithAllObjects(t *testing.T) {
	forEncodings(t, func(t *testing.T, s *Server, c kubernetes.Interface) {
		yes := true
		w, err := c.CoreV1().Services("shop").Watch(t.Context(), metav1.ListOptions{SendInitialEvents: &yes, AllowWatchBookmarks: true,
			ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, LabelSelector: "!proxy"})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		want(t, w, "ADDED headless", "ADDED web", "BOOKMARK true")
		apply(t, s, service("new", "10.96.0.3", nil))
		want(t, w, "ADDED new")
	})
}

func TestWatchEndsWithABookmark(t *testing.T) {
	forEncodings(t, func(t *testing.T, s *Server, c kubernetes.Interface) {
		list, err := c.CoreV1().Services("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		second := int64(1)
		w, err := c.CoreV1().Services("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion,
			AllowWatchBookmarks: true, TimeoutSeconds: &second})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		want(t, w, "BOOKMARK ", "end")
	})
}

// informer follows EndpointSlices as kube-proxy does, and sends their ports.
func informer(t *testing.T, c kubernetes.Interface) (<-chan int32, cache.Store) {
	t.Helper()
	ports := make(chan int32, 100)
	send := func(o any) { ports <- *o.(*discoveryv1.EndpointSlice).Ports[0].Port }
	f := informers.NewSharedInformerFactory(c, 0)
	i := f.Discovery().V1().EndpointSlices().Informer()
	_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: send, UpdateFunc: func(_, o any) { send(o) }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); f.Shutdown() })
	f.Start(ctx.Done())
	return ports, i.GetStore()
}

func slice(name string, port int32) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port}}}
}

func wantPort(t *testing.T, ports <-chan int32, want int32) {
	t.Helper()
	for limit := time.After(await.Limit); ; {
		select {
		case got := <-ports:
			if got == want {
				return
			}
		case <-limit:
			t.Fatalf("no port %d", want)
		}
	}
}

// A server that starts again at the same address has other versions: clients must list
// again, although the new server has had fewer changes or more.
func TestInformersOutliveTheServer(t *testing.T) {
	for _, encoding := range encodings {
		for _, changes := range []int{0, 50} {
			t.Run(encoding+strconv.Itoa(changes), func(t *testing.T) {
				t.Parallel()
				first := newServer(t, node("a"), slice("gone", 0), slice("web", 1))
				addr, stop := start(t, first, "")
				ports, known := informer(t, client(t, addr, encoding))
				wantPort(t, ports, 1)
				apply(t, first, slice("web", 2))
				wantPort(t, ports, 2)
				stop()
				second := newServer(t, slice("web", 3))
				for range changes {
					apply(t, second, slice("web", 3))
				}
				start(t, second, addr)
				wantPort(t, ports, 3)
				apply(t, second, slice("web", 4))
				wantPort(t, ports, 4)
				if names := known.ListKeys(); len(names) != 1 {
					t.Errorf("the informer knows %v", names)
				}
			})
		}
	}
}

func TestEventsAreAcceptedAndDropped(t *testing.T) {
	forEncodings(t, func(t *testing.T, _ *Server, c kubernetes.Interface) {
		e, err := c.EventsV1().Events("shop").Create(t.Context(),
			&eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "x"}, Reason: "Why"}, metav1.CreateOptions{})
		if err != nil || e.Reason != "Why" {
			t.Errorf("event is %v, error %v", e, err)
		}
		if list, err := c.EventsV1().Events("").List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) > 0 {
			t.Errorf("events: %v, error %v", list, err)
		}
	})
}

func TestEverythingElseIsRefusedAsAnAPIServerDoes(t *testing.T) {
	forEncodings(t, func(t *testing.T, _ *Server, c kubernetes.Interface) {
		services := c.CoreV1().Services("shop")
		get := func(path string) error { return c.CoreV1().RESTClient().Get().AbsPath(path).Do(t.Context()).Error() }
		list := func(o metav1.ListOptions) error { _, err := services.List(t.Context(), o); return err }
		follow := func(o metav1.ListOptions) error { _, err := services.Watch(t.Context(), o); return err }
		_, missing := services.Get(t.Context(), "none", metav1.GetOptions{})
		_, created := services.Create(t.Context(), service("new", "", nil), metav1.CreateOptions{})
		yes := true
		for what, tt := range map[string]struct {
			err error
			is  func(error) bool
		}{
			"no such Service":                 {missing, errors.IsNotFound},
			"no such kind":                    {get("/apis/policy.spillway.dev/v1alpha1/donottrackpolicies"), errors.IsNotFound},
			"no such path":                    {get("/version"), errors.IsNotFound},
			"a subresource":                   {get("/api/v1/namespaces/shop/services/web/status"), errors.IsNotFound},
			"create":                          {created, errors.IsMethodNotSupported},
			"delete":                          {services.Delete(t.Context(), "web", metav1.DeleteOptions{}), errors.IsMethodNotSupported},
			"a field that cannot be selected": {list(metav1.ListOptions{FieldSelector: "spec.type=NodePort"}), errors.IsBadRequest},
			"a bad selector":                  {list(metav1.ListOptions{LabelSelector: "=="}), errors.IsBadRequest},
			"a bad version":                   {list(metav1.ListOptions{ResourceVersion: "x"}), errors.IsBadRequest},
			"a list of an earlier server":     {list(metav1.ListOptions{ResourceVersion: "1000"}), errors.IsResourceExpired},
			"a watch of an earlier server":    {follow(metav1.ListOptions{ResourceVersion: "1000"}), errors.IsResourceExpired},
			"a watch with options of a list": {follow(metav1.ListOptions{ResourceVersion: "1",
				ResourceVersionMatch: metav1.ResourceVersionMatchExact}), errors.IsInvalid},
			"initial events without a version rule": {follow(metav1.ListOptions{SendInitialEvents: &yes}), errors.IsInvalid},
		} {
			if !tt.is(tt.err) {
				t.Errorf("%s: error %v, reason %q", what, tt.err, errors.ReasonForError(tt.err))
			}
		}
	})
}

func TestAcceptIsNegotiated(t *testing.T) {
	addr, _ := start(t, newServer(t, node("a")), "")
	for accept, want := range map[string]string{
		"":                                 runtime.ContentTypeJSON,
		"*/*":                              runtime.ContentTypeJSON,
		"application/json;q=0.5, " + "a/b": runtime.ContentTypeJSON,
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/json": runtime.ContentTypeJSON,
		runtime.ContentTypeProtobuf + ",application/json":               runtime.ContentTypeProtobuf,
		"text/html": "",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/api/v1/nodes", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", accept)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := resp.Header.Get("Content-Type"); want != "" && (got != want || resp.StatusCode != http.StatusOK) {
			t.Errorf("Accept %q: %s in %s, want %s", accept, resp.Status, got, want)
		}
		if want == "" && resp.StatusCode != http.StatusNotAcceptable {
			t.Errorf("Accept %q: %s", accept, resp.Status)
		}
	}
}

func TestObjectsMustHaveAKindAndAName(t *testing.T) {
	for _, o := range []runtime.Object{node(""), &metav1.Status{}, &corev1.ServiceList{}, &runtime.Unknown{}} {
		if _, err := New(o); err == nil {
			t.Errorf("%T: no error", o)
		}
	}
	s := newServer(t)
	if err := s.Delete(node("none")); err == nil {
		t.Error("delete of a missing Node: no error")
	}
	// The caller's object stays its own.
	n := node("a")
	apply(t, s, n)
	if n.ResourceVersion != "" || n.Kind != "" {
		t.Errorf("the given object was changed: %+v", n)
	}
}
