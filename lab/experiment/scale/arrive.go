package scale

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/listwatch"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

const (
	probePort     = 80
	probeNodePort = 30080
)

// arrival is a row that measures the path of a change. It starts with the write to the
// lab's API server and ends when a new connection gets its answer from the new endpoint.
type arrival struct {
	side   side
	crowd  int // Services besides the probe
	period time.Duration
}

func (a arrival) name() string {
	return fmt.Sprintf("%s: %d Services, API to packet, at most one sync in %v", a.side.name, a.crowd, a.period)
}

// arrivals lists the sides whose whole path is measured.
func arrivals(o experiment.Options) []arrival {
	all := []side{{"ebpf", "Spillway, eBPF"}, {"nftables", "Spillway, nftables"}, {"iptables-legacy", "Spillway, iptables (legacy)"},
		{"kube-proxy-nftables", "kube-proxy, nftables"}, {"kube-proxy-iptables-legacy", "kube-proxy, iptables (legacy)"}}
	var out []arrival
	add := func(crowd int, period time.Duration, modes ...string) {
		for _, s := range all {
			if len(modes) == 0 || slices.Contains(modes, s.mode) {
				out = append(out, arrival{s, crowd, period})
			}
		}
	}
	if o.Quick {
		add(200, time.Second, "ebpf", "kube-proxy-nftables")
		return out
	}
	add(1000, time.Second)
	add(peerLimit, time.Second, "ebpf", "nftables", "kube-proxy-nftables", "kube-proxy-iptables-legacy")
	add(1000, 10*time.Second, "ebpf", "nftables", "kube-proxy-nftables", "kube-proxy-iptables-legacy")
	return out
}

// changes is how often the endpoint is changed.
func (a arrival) changes(o experiment.Options) int {
	switch {
	case o.Quick:
		return 3
	case a.period > time.Second:
		return 2
	case a.crowd > 1000:
		return 6
	}
	return 10
}

func (a arrival) row(o experiment.Options) experiment.Row {
	side := experiment.Spillway
	if strings.HasPrefix(a.side.mode, "kube-proxy") {
		side = experiment.Other
	}
	return experiment.Row{
		Name: a.name(), Side: side, Group: "API to packet", Needs: harness.NeedKubeProxy,
		Takes: 5*time.Second + time.Duration(a.changes(o))*(a.period*3/2+200*time.Millisecond),
		Run:   func(ctx context.Context, m *experiment.Measurement) error { return a.run(ctx, o, m) },
	}
}

// run measures on a cluster of its own with an API server.
func (a arrival) run(ctx context.Context, o experiment.Options, m *experiment.Measurement) (err error) {
	spec := topology.DefaultSpec(o.Name + "-api")
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.Masquerade, spec.Conntrack = 1, 2, 2, true, true
	r, err := harness.Up(ctx, spec)
	if err != nil {
		return err
	}
	defer r.EndRow(m, &err)
	api, err := a.setUp(ctx, r)
	if err != nil {
		return err
	}
	cpu, err := r.AgentsCPU()
	if err != nil {
		return err
	}
	n := a.changes(o)
	for i := range n {
		o.Progress.Part(i, n)
		pod := r.Cluster.Pod(0, (i+1)%2)
		began := time.Now()
		if err := api.Apply(probeSlice(pod)); err != nil {
			return err
		}
		if err := waitFor(ctx, r, pod.Name, a.period*3+30*time.Second); err != nil {
			return err
		}
		m.Add("arrives", time.Since(began).Seconds()*1000)
		// The next change must come at a random point of the period: in a cluster changes
		// come at any time.
		pause := a.period/2 + a.period*time.Duration(i)/time.Duration(n)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
	after, err := r.AgentsCPU()
	m.Add("cpu_api", (after-cpu)*1000/float64(n))
	return err
}

// setUp starts servers, the API server with everything in it, and the proxy.
func (a arrival) setUp(ctx context.Context, r *harness.Harness) (*listwatch.Server, error) {
	c := r.Cluster
	for i := range 2 {
		if err := r.Serve(ctx, c.Pod(0, i), workload.HTTP, probePort); err != nil {
			return nil, err
		}
	}
	crowd := controlplane.Crowd{Namespace: "crowd", Services: a.crowd, Endpoints: 10, ClusterIP: netip.AddrFrom4([4]byte{10, 97, 0, 1})}
	api, err := r.API(ctx, c.Client(1), append(crowd.Objects(), probeService(), probeSlice(c.Pod(0, 0)))...)
	if err != nil {
		return nil, err
	}
	mode, isPeer := strings.CutPrefix(a.side.mode, "kube-proxy-")
	proxyMode, variant, _ := strings.Cut(mode, "-")
	if err := harness.UseIptables(ctx, c.Node(0), variant); err != nil {
		return nil, err
	}
	if isPeer {
		err = r.KubeProxy(ctx, c.Node(0), mode, a.period)
	} else {
		err = r.APIAgent(ctx, c.Node(0), proxyMode, "--iptables-min-sync-period", a.period.String())
	}
	if err != nil {
		return nil, err
	}
	return api, waitFor(ctx, r, c.Pod(0, 0).Name, 30*time.Second)
}

func probeService() *corev1.Service {
	const clusterIP = "10.96.0.10"
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "probe", Name: "probe"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: probePort, NodePort: probeNodePort}}}}
}

func probeSlice(pod *topology.Host) *discoveryv1.EndpointSlice {
	name, protocol, port, ready := "http", corev1.ProtocolTCP, int32(probePort), true
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "probe", Name: "probe",
			Labels: map[string]string{discoveryv1.LabelServiceName: "probe"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{pod.IPv4.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}, NodeName: &pod.Node}},
	}
}

// waitFor sends requests to the NodePort, each on a new connection, until a pod answers.
func waitFor(ctx context.Context, r *harness.Harness, pod string, limit time.Duration) error {
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DialContext: r.Cluster.Client(0).Dial, DisableKeepAlives: true}}
	url := "http://" + net.JoinHostPort(r.Cluster.Node(0).IPv4.String(), fmt.Sprint(probeNodePort)) + "/"
	var last string
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); {
		if err := ctx.Err(); err != nil {
			return err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			last = err.Error()
			time.Sleep(time.Millisecond)
			continue
		}
		body, _ := io.ReadAll(resp.Body) // the result decides
		resp.Body.Close()
		last, _, _ = strings.Cut(string(body), "\n")
		if last == pod {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return fmt.Errorf("wait for %s to answer: not within %v, but: %s", pod, limit, last)
}
