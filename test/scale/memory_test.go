package scale

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"runtime/pprof"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8stypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	typeddiscoveryv1 "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/utils/ptr"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/test/await"
)

var (
	memoryServices = flag.Int("memory-services", 10_000, "Services of ten endpoints in TestMemoryOfAService.")
	heapProfile    = flag.String("heap-profile", "", "File for TestMemoryOfAService's heap profile; best with -test.memprofilerate 1.")
)

const (
	// serviceHeap bounds the heap of one Service of ten endpoints, in bytes, in all of the
	// agent: source, facts, decision, reconcile, and eBPF dataplane. It takes 5117 bytes with
	// Go 1.26; a tenth more leaves room for the size classes of other versions.
	serviceHeap      = 5632
	memoryEndpoints  = 10
	memoryNodes      = 100
	memoryNamespaces = 100
)

// TestMemoryOfAService runs source, decisions, reconcile and the eBPF dataplane, and
// measures the heap that stays. The API server is a list that is made while it is read, so
// that the heap has no objects of it.
func TestMemoryOfAService(t *testing.T) {
	n := *memoryServices
	k := openEBPF(t, uint32(2*n*(memoryEndpoints+1)))
	before := heap()
	r, err := reconcile.New(reconcile.Config{
		Tracker: decisions.New(intent.Config{NodeName: "node-0"}, donottrack.Config{NodeName: "node-0"}), Backends: []dataplane.Backend{k.reader},
		SyncPeriod: time.Hour, MinSyncPeriod: time.Millisecond, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	source, err := kube.New(kube.Config{Client: crowd{services: n}, NodeName: "node-0"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	r.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
	var grown int64
	go func() {
		defer cancel()
		if err := await.Error(func() error {
			if s := r.Status(); ctx.Err() == nil && (!s.Listed || !s.PendingSince.IsZero()) {
				return fmt.Errorf("status %+v", s)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		grown = settledHeap() - before
		writeHeapProfile(t)
	}()
	ended := make(chan error, 1)
	go func() { ended <- source.Run(ctx, r.Deliver) }()
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if ports := len(k.endpoints(t)); ports != n*memoryEndpoints {
		t.Fatalf("%d endpoints are served, want %d", ports, n*memoryEndpoints)
	}
	t.Logf("%d bytes of heap for each of %d Services of %d endpoints", grown/int64(n), n, memoryEndpoints)
	if grown > int64(n)*serviceHeap {
		t.Errorf("a Service of %d endpoints takes %d bytes of heap, more than %d", memoryEndpoints, grown/int64(n), serviceHeap)
	}
	runtime.KeepAlive(r)
	runtime.KeepAlive(source)
}

// settledHeap is what is in use after the dataplane has compared its maps, which needs
// memory of its own.
func settledHeap() int64 {
	for before := heap(); ; {
		time.Sleep(2 * time.Second)
		now := heap()
		if before-now < 1<<18 && now-before < 1<<18 {
			return now
		}
		before = now
	}
}

func writeHeapProfile(t *testing.T) {
	if *heapProfile == "" {
		return
	}
	f, err := os.Create(*heapProfile)
	if err == nil {
		err = pprof.Lookup("heap").WriteTo(f, 0)
		f.Close()
	}
	if err != nil {
		t.Error(err)
	}
}

// crowd is a client of an API server with Services of ten endpoints. Each object has
// strings of its own, as one that was decoded.
type crowd struct {
	kubernetes.Interface
	services int
}

func (c crowd) CoreV1() typedcorev1.CoreV1Interface { return crowdCore{c.services, nil} }
func (c crowd) DiscoveryV1() typeddiscoveryv1.DiscoveryV1Interface {
	return crowdDiscovery{c.services, nil}
}

type (
	crowdCore struct {
		services int
		typedcorev1.CoreV1Interface
	}
	crowdServices struct {
		services int
		typedcorev1.ServiceInterface
	}
	crowdNodes struct {
		typedcorev1.NodeInterface
	}
	crowdDiscovery struct {
		services int
		typeddiscoveryv1.DiscoveryV1Interface
	}
	crowdSlices struct {
		services int
		typeddiscoveryv1.EndpointSliceInterface
	}
)

func (c crowdCore) Services(string) typedcorev1.ServiceInterface {
	return crowdServices{c.services, nil}
}
func (c crowdCore) Nodes() typedcorev1.NodeInterface { return crowdNodes{} }
func (c crowdDiscovery) EndpointSlices(string) typeddiscoveryv1.EndpointSliceInterface {
	return crowdSlices{c.services, nil}
}

// decoded returns the object with strings of its own.
func decoded[T interface {
	Marshal() ([]byte, error)
}](o T, into interface{ Unmarshal([]byte) error }) {
	raw, err := o.Marshal()
	if err == nil {
		err = into.Unmarshal(raw)
	}
	if err != nil {
		panic(err)
	}
}

// quietWatch refuses a watch that begins with a list, and then sends nothing.
func quietWatch(o metav1.ListOptions) (watch.Interface, error) {
	if ptr.Deref(o.SendInitialEvents, false) {
		return nil, apierrors.NewMethodNotSupported(corev1.Resource("lists"), "watch")
	}
	return watch.NewFake(), nil
}

func (crowdServices) Watch(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	return quietWatch(o)
}

func (crowdNodes) Watch(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	return quietWatch(o)
}

func (crowdSlices) Watch(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	return quietWatch(o)
}

func (crowdNodes) List(context.Context, metav1.ListOptions) (*corev1.NodeList, error) {
	return &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}, nil
}

func (c crowdServices) List(context.Context, metav1.ListOptions) (*corev1.ServiceList, error) {
	l := &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: make([]corev1.Service, c.services)}
	for i := range l.Items {
		addr := address(172, 0x100000+i).String()
		decoded(&corev1.Service{
			ObjectMeta: crowdMeta(i, ""),
			Spec: corev1.ServiceSpec{
				Type: corev1.ServiceTypeClusterIP, ClusterIP: addr, ClusterIPs: []string{addr},
				Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
			},
		}, &l.Items[i])
	}
	return l, nil
}

func (c crowdSlices) List(context.Context, metav1.ListOptions) (*discoveryv1.EndpointSliceList, error) {
	l := &discoveryv1.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: make([]discoveryv1.EndpointSlice, c.services)}
	for i := range l.Items {
		service := crowdMeta(i, "")
		s := discoveryv1.EndpointSlice{
			ObjectMeta:  crowdMeta(i, "-x7k2p"),
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](8080)}},
		}
		s.Labels = map[string]string{discoveryv1.LabelServiceName: service.Name}
		s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05Z"}
		for e := range memoryEndpoints {
			id := i*memoryEndpoints + e
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{address(10, id).String()}, NodeName: ptr.To(fmt.Sprintf("node-%02d.example.internal", id%memoryNodes)),
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
				Zone:       ptr.To("zone-a"),
				TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: service.Namespace, Name: fmt.Sprintf("%s-5d4f8c9b7-%05d", service.Name, e)},
			})
		}
		decoded(&s, &l.Items[i])
	}
	return l, nil
}

func crowdMeta(i int, suffix string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: fmt.Sprintf("team-%02d", i%memoryNamespaces), Name: fmt.Sprintf("service-%05d%s", i, suffix),
		UID: k8stypes.UID(fmt.Sprintf("c5b1e6a2-0000-4000-8000-%012d", i)), CreationTimestamp: metav1.NewTime(time.Unix(1767312245, 0)),
	}
}
