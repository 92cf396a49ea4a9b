package controlplane

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Crowd is many Services of one kind, each with one EndpointSlice: svc-0,
// svc-1 and so on, TCP port 80 to 8080.
type Crowd struct {
	Namespace string // created if missing
	Services  int
	Endpoints int // of each Service
	// Nodes have the endpoints in turn. If empty, endpoints name no node.
	Nodes []string
	// First is the address of the first endpoint; the others count up from it. Zero is
	// 10.128.0.1. Only IPv4.
	First netip.Addr
	// ClusterIP is the address of the first Service; the others count up from it. If it is
	// not set, the API server allocates addresses.
	ClusterIP netip.Addr
	// Parallel is the number of concurrent requests; 0 is 32.
	Parallel int
}

// Objects returns the Services and their slices.
func (w Crowd) Objects() []runtime.Object {
	out := make([]runtime.Object, 0, 2*w.Services)
	for i := range w.Services {
		out = append(out, w.service(i), w.Slice(i))
	}
	return out
}

// Create writes the Services and their slices through the API. The time grows
// faster than their number: for each Service kube-apiserver 1.36 counts all
// addresses in use, for a metric (ipallocator.Allocator.Used).
func (w Crowd) Create(ctx context.Context, client kubernetes.Interface) error {
	if w.Parallel == 0 {
		w.Parallel = 32
	}
	if err := EnsureNamespace(ctx, client, w.Namespace); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(w.Parallel)
	for i := range w.Services {
		slice := w.Slice(i)
		g.Go(func() error {
			if _, err := client.CoreV1().Services(w.Namespace).Create(ctx, w.service(i), metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create Service %d: %w", i, err)
			}
			if _, err := client.DiscoveryV1().EndpointSlices(w.Namespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create EndpointSlice %d: %w", i, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// EnsureNamespace creates a missing namespace.
func EnsureNamespace(ctx context.Context, client kubernetes.Interface, name string) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	if err != nil && !errors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}

func (w Crowd) name(i int) string { return fmt.Sprintf("svc-%d", i) }

func (w Crowd) service(i int) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: w.name(i), Namespace: w.Namespace},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}},
	}
	if w.ClusterIP.IsValid() {
		s.Spec.ClusterIP = count(w.ClusterIP, i).String()
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	}
	return s
}

// Slice returns the EndpointSlice of a Service as Create writes it.
func (w Crowd) Slice(i int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: w.name(i), Namespace: w.Namespace,
			Labels: map[string]string{discoveryv1.LabelServiceName: w.name(i)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{
			Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(corev1.ProtocolTCP),
		}},
	}
	addr := w.first(i)
	for k := range w.Endpoints {
		ep := discoveryv1.Endpoint{
			Addresses:  []string{addr.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
		}
		if len(w.Nodes) > 0 {
			ep.NodeName = ptr.To(w.Nodes[(i+k)%len(w.Nodes)])
		}
		s.Endpoints = append(s.Endpoints, ep)
		addr = addr.Next()
	}
	return s
}

// first is the address of a Service's first endpoint.
func (w Crowd) first(i int) netip.Addr {
	from := w.First
	if !from.IsValid() {
		from = netip.AddrFrom4([4]byte{10, 128, 0, 1})
	}
	return count(from, i*w.Endpoints)
}

// count is the IPv4 address n after another.
func count(from netip.Addr, n int) netip.Addr {
	raw := from.As4()
	binary.BigEndian.PutUint32(raw[:], binary.BigEndian.Uint32(raw[:])+uint32(n))
	return netip.AddrFrom4(raw)
}
