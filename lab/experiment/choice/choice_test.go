// Package choice compares how proxies choose among endpoints of which one is slow.
//
//	node0: pod1, 20 clients ── Service ── node1: pod0, 10 servers on ports of their own
package choice

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/testbed/topology"
)

// Each server answers one connection at a time. Each client connects, waits for the answer, and
// connects again.
const (
	servers    = 10
	clients    = 20
	firstPort  = 8000
	slowAnswer = 50 * time.Millisecond // of the first server
	fastAnswer = time.Millisecond
	measured   = 2 * time.Second // in each round
	clusterIP  = "10.96.0.10"
)

// proxies are the rows. balance "" is the default.
var proxies = []struct {
	name, mode string
	kubeProxy  bool
	balance    string
}{
	{"kube-proxy, iptables", "iptables", true, ""},
	{"kube-proxy, nftables", "nftables", true, ""},
	{"Spillway, nftables", "nftables", false, ""},
	{"Spillway, eBPF", "ebpf", false, ""},
	{"Spillway, eBPF, least", "ebpf", false, "least"},
	{"Spillway, eBPF, latency", "ebpf", false, "latency"},
}

// BenchmarkSlowEndpoint reports how long clients wait for the answer of a Service with ten
// endpoints, one of which is slow, as a table:
//
//	go test ./lab/experiment/choice -run '^$' -bench SlowEndpoint -benchtime 4x -v
func BenchmarkSlowEndpoint(b *testing.B) {
	own, err := os.Executable()
	if err == nil {
		_, err = cluster.Build(b.Context(), filepath.Dir(own), "") // where the harness looks for it
	}
	if err != nil {
		b.Fatal(err)
	}
	clusters := make([]*harness.Harness, len(proxies))
	for i := range proxies {
		clusters[i] = start(b, i)
	}
	took := make([][]time.Duration, len(proxies))
	for round := 0; b.Loop(); round++ {
		for i := range proxies {
			if round%2 == 1 {
				i = len(proxies) - 1 - i
			}
			took[i] = append(took[i], ask(b, clusters[i].Cluster.Pod(0, 1), measured)...)
		}
	}
	b.ReportMetric(0, "ns/op")
	var table strings.Builder
	for i, p := range proxies {
		list := took[i]
		slices.Sort(list)
		at := func(q float64) float64 {
			return list[int(math.Ceil(q*float64(len(list))))-1].Seconds() * 1000
		}
		fmt.Fprintf(&table, "%-28s %8d %8.1f %8.1f %8.1f\n", p.name, len(list), at(0.5), at(0.99), at(1))
	}
	b.Logf("ms until the answer\n%-28s %8s %8s %8s %8s\n%s", "", "answers", "median", "p99", "max", table.String())
}

// start builds a cluster with a proxy and servers, and waits until the Service answers.
func start(b *testing.B, i int) *harness.Harness {
	b.Helper()
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	ctx, p := b.Context(), proxies[i]
	h, err := harness.Up(ctx, topology.DefaultSpec(fmt.Sprint("choice-", i)))
	must(err)
	b.Cleanup(func() { must(h.Down()) })
	pod := h.Cluster.Pod(1, 0)
	for n := range servers {
		answer := fastAnswer
		if n == 0 {
			answer = slowAnswer
		}
		must(serve(ctx, b, pod, firstPort+n, answer))
	}
	_, err = h.API(ctx, h.Cluster.Client(0), objects(pod, p.balance)...)
	must(err)
	for n := range h.Cluster.Spec.Nodes {
		node := h.Cluster.Node(n)
		switch {
		case p.kubeProxy:
			must(h.KubeProxy(ctx, node, p.mode, 0))
		case p.balance != "":
			must(h.APIAgent(ctx, node, p.mode, "--balance-by-load"))
		default:
			must(h.APIAgent(ctx, node, p.mode))
		}
	}
	ask(b, h.Cluster.Pod(0, 1), 200*time.Millisecond)
	return h
}

// serve answers connections at a port of a host, one after the other, until the test ends.
func serve(ctx context.Context, b *testing.B, host *topology.Host, port int, answer time.Duration) error {
	l, err := host.Listen(ctx, "tcp", fmt.Sprintf("%s:%d", host.IPv4, port))
	if err != nil {
		return fmt.Errorf("listen on %s: %w", host.Name, err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			time.Sleep(answer)
			_, _ = conn.Write([]byte{1}) // the client notices a failure
			conn.Close()
		}
	}()
	return nil
}

// ask has clients connect from a host for a while, and returns how long each answer took.
func ask(b *testing.B, host *topology.Host, while time.Duration) (all []time.Duration) {
	b.Helper()
	var mu sync.Mutex
	var group sync.WaitGroup
	end := time.Now().Add(while)
	for range clients {
		group.Go(func() {
			for time.Now().Before(end) {
				began := time.Now()
				conn, err := host.Dial(b.Context(), "tcp", clusterIP+":80")
				if err != nil {
					b.Error(err)
					return
				}
				n, err := conn.Read(make([]byte, 1))
				took := time.Since(began)
				conn.Close()
				if n != 1 {
					b.Error(n, err)
				}
				mu.Lock()
				all = append(all, took)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	return all
}

// objects are the Service and a slice for each server: a slice has one port.
func objects(pod *topology.Host, balance string) []runtime.Object {
	service := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: "slow"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}}},
	}
	if balance != "" {
		service.Annotations = map[string]string{intent.BalanceAnnotation: balance}
	}
	list := []runtime.Object{service}
	for n := range servers {
		unnamed, ready, port, protocol := "", true, int32(firstPort+n), corev1.ProtocolTCP
		list = append(list, &discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: fmt.Sprint("slow-", n),
				Labels: map[string]string{discoveryv1.LabelServiceName: "slow"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: &unnamed, Port: &port, Protocol: &protocol}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{pod.IPv4.String()},
				Conditions: discoveryv1.EndpointConditions{Ready: &ready}, NodeName: &pod.Node}},
		})
	}
	return list
}
