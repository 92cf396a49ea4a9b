package life

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/flows/probe"
)

// localService sends a load balancer's traffic only to nodes that have endpoints: node0
// and node1. A load balancer asks the healthCheckNodePort which ones.
const localService = `
apiVersion: v1
kind: Service
metadata: {name: local}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: %[2]d
  selector: {app: peer}
  ports: [{name: tcp, port: 80, targetPort: 8080, nodePort: %[1]d}]
`

const (
	localNodePort       = 30081
	healthCheckNodePort = 30082
	healthz             = 10256
)

// readiness checks what load balancers and the kubelet see of an agent: a node whose
// agent is not ready gets no new traffic, and an agent is ready only once it serves. It
// also checks that a cleanup leaves nothing, and that Spillway can be installed again.
func readiness(t *testing.T, c *cluster.Cluster, l *load) {
	clustertest.Must(t, c.Apply(t.Context(), fmt.Sprintf(localService, localNodePort, healthCheckNodePort)))
	wantHealthChecks(t, c, http.StatusOK, http.StatusOK, http.StatusServiceUnavailable)

	t.Run("not ready", func(t *testing.T) {
		l.start(t, c)
		defer l.end(t) // the kernel serves on: only load balancers choose other nodes
		kubectl(t, c, "delete", "clusterrolebinding", "-l", "app.kubernetes.io/component=agent")
		pod := agents(t, c)["node0"]
		clustertest.Must(t, pod.Kill())
		await.True(t, "the agent that may not read Services runs, and is not Ready", func() bool {
			return conditions(t, c, pod.Name) == "ContainersReady=False Ready=False" && get(t, c, 0, healthz, "/healthz") != 0
		})
		for range 50 {
			if get(t, c, 0, healthCheckNodePort, "/") == http.StatusOK || get(t, c, 0, healthz, "/healthz") == http.StatusOK {
				t.Fatal("load balancers send new connections to a node whose agent is not ready")
			}
			time.Sleep(100 * time.Millisecond)
		}
		wantHealthChecks(t, c, 0, http.StatusOK, http.StatusServiceUnavailable)
		clustertest.Must(t, c.InstallSpillway(t.Context())) // with the rights, until the agent is Ready
		wantHealthChecks(t, c, http.StatusOK, http.StatusOK, http.StatusServiceUnavailable)
	})

	t.Run("uninstalled", func(t *testing.T) {
		clustertest.Must(t, c.InstallSpillway(t.Context(), "cleanup=true"))
		clustertest.Must(t, c.WaitForRollout(t.Context(), "kube-system", "daemonset/spillway"))
		helm(t, c, "uninstall", "spillway", "--wait")
		wantNothingLeft(t, c)
		if a := l.try(t, "tcp", l.service(c, "client0")); a.Err == probe.OK {
			t.Errorf("%s still serves the NodePort", a.Server)
		}
	})

	t.Run("installed again", func(t *testing.T) {
		clustertest.Must(t, c.Apply(t.Context(), manyServices(200)))
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		var nodes sync.WaitGroup
		for i := range c.AllNodes() {
			nodes.Go(func() { l.tryOnceReady(ctx, t, c, i) })
		}
		clustertest.Must(t, c.InstallSpillway(ctx))
		nodes.Wait()
		wantHealthChecks(t, c, http.StatusOK, http.StatusOK, http.StatusServiceUnavailable)
		l.settle(t, c)
		l.start(t, c)
		time.Sleep(2 * time.Second)
		l.end(t)
	})
}

// tryOnceReady asks the Services at a node's ports as soon as the agent there answers that
// it serves them. The kubelet asks /healthz, and load balancers the healthCheckNodePort.
func (l *load) tryOnceReady(ctx context.Context, t *testing.T, c *cluster.Cluster, node int) {
	type check struct {
		port    uint16
		path    string
		protos  []string
		service uint16
	}
	checks := []check{{healthz, "/healthz", []string{"tcp", "udp"}, clustertest.NodePort}}
	if node < 2 {
		checks = append(checks, check{healthCheckNodePort, "/", []string{"tcp"}, localNodePort})
	}
	var all sync.WaitGroup
	defer all.Wait()
	for _, check := range checks {
		all.Go(func() {
			for get(t, c, node, check.port, check.path) != http.StatusOK {
				if ctx.Err() != nil {
					t.Errorf("port %d of node%d does not answer 200: %v", check.port, node, ctx.Err())
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
			for _, proto := range check.protos {
				dst := netip.AddrPortFrom(c.Node(node).Host().IPv4, check.service).String()
				if a := l.try(t, proto, dst); a.Err != probe.OK {
					t.Errorf("port %d answers 200, but %s %s is not served: %s %s", check.port, proto, dst, a.Err, a.Detail)
				}
			}
		})
	}
}

// try asks once, from client0.
func (l *load) try(t *testing.T, proto, dst string) probe.Answer {
	t.Helper()
	resp, err := l.probes["client0"].Do(t.Context(), probe.Request{Op: probe.Try, Netexec: true, Proto: proto, Dst: dst})
	if err != nil {
		t.Error(err)
		return probe.Answer{Err: probe.Other}
	}
	return resp.Answers[0]
}

// manyServices make the first sync long enough to be seen.
func manyServices(n int) string {
	var yaml strings.Builder
	for i := range n {
		fmt.Fprintf(&yaml, "---\n{apiVersion: v1, kind: Service, metadata: {name: many-%d}, spec: {ports: [{port: 80}]}}\n", i)
		fmt.Fprintf(&yaml, "---\n{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: many-%d, labels: "+
			"{kubernetes.io/service-name: many-%[1]d}},"+
			" addressType: IPv4, ports: [{port: 80, protocol: TCP}], endpoints: [{addresses: [10.244.0.250]}]}\n", i)
	}
	return yaml.String()
}

// wantHealthChecks waits until a load balancer gets these answers from the nodes. 0 is a
// refused connection.
func wantHealthChecks(t *testing.T, c *cluster.Cluster, want ...int) {
	t.Helper()
	var got []int
	await.True(t, fmt.Sprintf("healthCheckNodePorts answer %v", want), func() bool {
		got = nil
		for i := range c.AllNodes() {
			got = append(got, get(t, c, i, healthCheckNodePort, "/"))
		}
		return slices.Equal(got, want)
	})
}

// get returns the status with which a port of a node answers client0, and 0 if it does
// not.
func get(t *testing.T, c *cluster.Cluster, node int, port uint16, path string) int {
	client := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DialContext: c.Client().Dial, DisableKeepAlives: true}}
	url := fmt.Sprintf("http://%s%s", netip.AddrPortFrom(c.Node(node).Host().IPv4, port), path)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// conditions returns whether a Pod's containers, and it, are Ready.
func conditions(t *testing.T, c *cluster.Cluster, pod string) string {
	t.Helper()
	return strings.TrimSpace(kubectl(t, c, "get", "pod", pod, "--output",
		`jsonpath={range .status.conditions[?(@.type=="ContainersReady")]}{.type}={.status} {end}{range .status.conditions[?(@.type=="Ready")]}{.type}={.status}{end}`))
}
