package harness

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

const kubeProxyTestPort = 30080

func kubeProxyService() *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "lab", Name: "web"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 7, NodePort: kubeProxyTestPort}}}}
}

func kubeProxySlice(pod *topology.Host) *discoveryv1.EndpointSlice {
	name, protocol, port := "", corev1.ProtocolUDP, int32(7)
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "lab", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{pod.IPv4.String()}, NodeName: &pod.Node}},
	}
}

// The real kube-proxy must sync from the list and watch server, follow its changes, and
// follow a new server after the first one has ended.
func TestKubeProxyFollowsTheServer(t *testing.T) {
	needRoot(t)
	if err := NeedKubeProxy(); err != nil {
		t.Skip(err)
	}
	for _, mode := range []string{"nftables", "iptables-nft"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			followServer(t, mode)
		})
	}
}

func followServer(t *testing.T, mode string) {
	ctx := t.Context()
	spec := smallSpec("kp-" + mode[:4])
	spec.PodsPerNode, spec.Clients = 3, 2
	r, err := Up(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Down(); err != nil {
			t.Error(err)
		}
	})
	c := r.Cluster
	for i := range 3 {
		if err := r.Serve(ctx, c.Pod(0, i), workload.UDP, 7); err != nil {
			t.Fatal(err)
		}
	}
	api, err := r.API(ctx, c.Client(1), kubeProxyService(), kubeProxySlice(c.Pod(0, 0)))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.KubeProxy(ctx, c.Node(0), mode, 0); err != nil {
		t.Fatal(err)
	}
	waitPod(t, r, c.Pod(0, 0))
	if err := api.Apply(kubeProxySlice(c.Pod(0, 1))); err != nil {
		t.Fatal(err)
	}
	waitPod(t, r, c.Pod(0, 1))
	if err := r.api.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.API(ctx, c.Client(1), kubeProxyService(), kubeProxySlice(c.Pod(0, 2))); err != nil {
		t.Fatal(err)
	}
	waitPod(t, r, c.Pod(0, 2))
}

// waitPod asks from new ports until a pod answers at the NodePort.
func waitPod(t *testing.T, r *Harness, pod *topology.Host) {
	t.Helper()
	q := workload.Question{Kind: workload.UDP, To: netip.AddrPortFrom(r.Cluster.Node(0).IPv4, kubeProxyTestPort).String(),
		Timeout: time.Second}
	await.NoError(t, func() error {
		a, err := workload.Ask(context.Background(), r.Cluster.Client(0), q)
		if err == nil && (a.Outcome != workload.Answered || a.Server != pod.Name) {
			err = fmt.Errorf("%s does not answer; last: %+v; %s", pod.Name, a, r.Logs())
		}
		return err
	})
}
