package stream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

const (
	crowdNamespace = "crowd"
	probeNamespace = "probe"
	probePort      = 80 // of the server that answers
	// probeServices is the number of Services that take turns as probes.
	probeServices = 100
	startWithin   = 2 * time.Minute
	// patience is the time limit for a change to reach the kernel. A later one counts as
	// lost.
	patience = 20 * time.Second
	// The interval of requests to a Service is pollLeast, or pollShare of the time waited
	// so far, if that is longer. The measured time is too long by that at most.
	pollLeast = time.Millisecond
	pollShare = 0.05
)

// probe is a Service whose one endpoint is present or absent.
type probe struct {
	slice *discoveryv1.EndpointSlice
	from  *topology.Host
	addr  string
	ready bool
	busy  chan struct{} // has one token while a probe waits for a change
}

// populate writes all Services and their EndpointSlices.
func (b *bench) populate(ctx context.Context) error {
	for i := range b.cfg.Proxies {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: b.harness.Cluster.Node(i).Name}}
		if _, err := b.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create Node: %w", err)
		}
	}
	b.crowd = controlplane.Crowd{Namespace: crowdNamespace, Services: b.cfg.Services, Endpoints: Endpoints,
		First: netip.MustParseAddr("10.0.0.1")}
	if err := b.crowd.Create(ctx, b.client); err != nil {
		return err
	}
	probes := controlplane.Crowd{Namespace: probeNamespace, Services: probeServices}
	return probes.Create(ctx, b.client)
}

// prepareProbes points the probes to a pod of the node that sends the requests.
func (b *bench) prepareProbes(ctx context.Context, node int) ([]*probe, error) {
	var probes []*probe
	list, err := b.client.CoreV1().Services(probeNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list Services: %w", err)
	}
	for _, svc := range list.Items {
		meta := metav1.ObjectMeta{Name: svc.Name, Namespace: probeNamespace, Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}}
		p := &probe{
			slice: &discoveryv1.EndpointSlice{
				ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4,
				Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](probePort)}},
				Endpoints: []discoveryv1.Endpoint{{Addresses: []string{b.harness.Cluster.Pod(node, 1).IPv4.String()},
					NodeName: ptr.To(b.harness.Cluster.Node(node).Name)}},
			},
			from: b.harness.Cluster.Pod(node, 0), addr: net.JoinHostPort(svc.Spec.ClusterIP, strconv.Itoa(int(svc.Spec.Ports[0].Port))),
			busy: make(chan struct{}, 1),
		}
		if _, err := b.update(ctx, p.set(true)); err != nil {
			return nil, err
		}
		probes = append(probes, p)
	}
	return probes, nil
}

// set returns the slice with the endpoint ready or not.
func (p *probe) set(ready bool) *discoveryv1.EndpointSlice {
	p.ready = ready
	s := p.slice.DeepCopy()
	s.Endpoints[0].Conditions.Ready = &ready
	return s
}

// update writes a slice, whatever its version, and returns the new version.
func (b *bench) update(ctx context.Context, s *discoveryv1.EndpointSlice) (version string, err error) {
	s, err = b.client.DiscoveryV1().EndpointSlices(s.Namespace).Update(ctx, s, metav1.UpdateOptions{})
	if err != nil {
		return "", fmt.Errorf("change EndpointSlice: %w", err)
	}
	return s.ResourceVersion, nil
}

var errLost = errors.New("the change has not reached the kernel")

// await connects until the kernel has the written state.
func (p *probe) await(ctx context.Context, ready bool, within time.Duration) error {
	start := time.Now()
	for {
		if p.answers(ctx) == ready {
			return nil
		}
		passed := time.Since(start)
		if passed > within {
			return fmt.Errorf("%w: %s has been ready=%v for %v", errLost, p.addr, ready, within)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(pollLeast, time.Duration(pollShare*float64(passed)))):
		}
	}
}

// answers reports whether the Service accepts a connection.
func (p *probe) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	conn, err := p.from.Dial(ctx, "tcp", p.addr)
	if err != nil {
		return false
	}
	_ = conn.(*net.TCPConn).SetLinger(0) // no TIME_WAIT
	_ = conn.Close()
	return true
}
