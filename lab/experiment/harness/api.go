package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwait "k8s.io/apimachinery/pkg/util/wait"

	"spillway.dev/spillway/lab/listwatch"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
)

const apiPort = 8080

// API starts an API server of fixed objects on a host of the cluster: the cluster's
// Nodes, its Service ranges, and the given objects, which need no defaults. The returned
// server changes them. Proxies that start later read from it.
func (h *Harness) API(ctx context.Context, host *topology.Host, objects ...runtime.Object) (*listwatch.Server, error) {
	server, err := listwatch.New(serviceCIDR())
	if err != nil {
		return nil, err
	}
	for _, n := range h.Cluster.NodeObjects() {
		if err := server.Apply(n); err != nil {
			return nil, err
		}
	}
	if err := server.Apply(objects...); err != nil {
		return nil, err
	}
	addr := netip.AddrPortFrom(host.Addrs()[0], apiPort)
	l, err := listen(ctx, host, addr)
	if err != nil {
		return nil, fmt.Errorf("start API server on %s: %w", host.Name, err)
	}
	h.kubeconfig, err = h.WriteFile("kubeconfig", fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "http://%s"}}]
contexts: [{name: lab, context: {cluster: lab}}]
current-context: lab
`, addr))
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	h.api = &http.Server{Handler: server, BaseContext: func(net.Listener) context.Context { return h.life }}
	go func() { _ = h.api.Serve(l) }() // Down ends it
	return server, nil
}

// listen listens on an address that a server has just left. A program that starts meanwhile has
// a copy of the old socket until its exec(), which on a busy machine takes a while.
func listen(ctx context.Context, host *topology.Host, addr netip.AddrPort) (l net.Listener, err error) {
	wait := func(ctx context.Context) (bool, error) {
		l, err = host.Listen(ctx, "tcp", addr.String())
		return !errors.Is(err, unix.EADDRINUSE), nil
	}
	if ended := apiwait.PollUntilContextTimeout(ctx, 10*time.Millisecond, time.Minute, true, wait); err == nil {
		err = ended
	}
	return l, err
}

// Kubeconfig returns the path of a kubeconfig for the server that API started.
func (h *Harness) Kubeconfig() string { return h.kubeconfig }

// serviceCIDR is the object that kube-apiserver makes of its Service ranges.
func serviceCIDR() *networkingv1.ServiceCIDR {
	c := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}}
	for _, p := range controlplane.DefaultServiceCIDRs {
		c.Spec.CIDRs = append(c.Spec.CIDRs, p.String())
	}
	c.Status.Conditions = []metav1.Condition{{Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue}}
	return c
}
