package life

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/images"
	"spillway.dev/spillway/test/flows/probe"
)

// withHostPort is a Pod with a host port, and one that is the NodePort of a Service.
const withHostPort = `
apiVersion: v1
kind: Pod
metadata: {name: hostport, labels: {app: hostport}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  containers: [{name: hostport, image: %[1]s, imagePullPolicy: Never, args: [netexec], ports: [{containerPort: 8080, hostPort: %[2]d}, {containerPort: 8081, hostPort: %[3]d}]}]
`

// removed is a Service that has this Pod alone, until the test removes it. Its server runs on.
const removed = `
apiVersion: v1
kind: Service
metadata: {name: removed}
spec:
  clusterIP: %[1]s
  ports: [{name: tcp, port: 80, targetPort: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: removed, labels: {kubernetes.io/service-name: removed}}
addressType: IPv4
ports: [{name: tcp, port: 8080, protocol: TCP}]
endpoints: [{addresses: [%[2]s], nodeName: node1, conditions: {ready: true}}]
`

const (
	hostPort         = 18088
	removedClusterIP = "10.96.7.9"
)

// optionalParts switches on what is off by default: host ports without the CNI's plugin portmap,
// sockets that end with their endpoint, and choice by load.
func optionalParts(t *testing.T, c *cluster.Cluster, l *load) {
	out, err := c.Node(1).Command(t.Context(), "bash", "-euc",
		`sed -i -z 's/,[[:space:]]*{"type": *"portmap"[^}]*}}//' /etc/cni/net.d/*.conflist; cat /etc/cni/net.d/*.conflist; ! grep portmap /etc/cni/net.d/*.conflist`).CombinedOutput()
	if err != nil {
		t.Fatalf("remove portmap: %v: %s", err, out)
	}
	values := []string{"hostPorts=true"}
	if *proxyMode == "ebpf" {
		values = append(values, "endSockets=all", "balanceByLoad=true")
	}
	clustertest.Must(t, c.InstallSpillway(t.Context(), values...))
	image, err := images.Reference("agnhost")
	clustertest.Must(t, err)
	clustertest.Must(t, c.Apply(t.Context(), fmt.Sprintf(withHostPort, image, hostPort, clustertest.NodePort)))
	defer kubectl(t, c, "--namespace=default", "delete", "pod/hostport", "service/removed", "endpointslice/removed",
		"--ignore-not-found", "--timeout=1m")
	await.True(t, "the host port answers at its node", func() bool {
		return get(t, c, 1, hostPort, "/hostname") == http.StatusOK
	})
	if status := get(t, c, 0, hostPort, "/hostname"); status != 0 {
		t.Errorf("the host port answers %d at another node", status)
	}
	uid := kubectl(t, c, "--namespace=default", "get", "pod/hostport", "--output=jsonpath={.metadata.uid}")
	await.True(t, "the Pod has an Event about its other host port", func() bool {
		return strings.Contains(kubectl(t, c, "--namespace=default", "get", "events",
			"--field-selector=reason=NotServedAsAsked,involvedObject.uid="+uid),
			fmt.Sprintf("NodePort %d/TCP (IPv4) is already taken by Service default/peer", clustertest.NodePort))
	})
	if *proxyMode == "ebpf" {
		// A security module of the kernel may refuse what ends sockets.
		const refused = "iterate sockets by eBPF: load program: operation not permitted"
		if strings.Contains(kubectl(t, c, "logs", "--selector=app.kubernetes.io/name=spillway", "--tail=-1"), refused) {
			t.Log("no socket is ended: " + refused)
		} else {
			l.wantEndOfSockets(t, c)
		}
		l.wantChoiceByLoad(t, c)
	}
}

// wantEndOfSockets removes an endpoint whose server runs on: the connection of a Pod to it must
// end, and no other (l's streams go on).
func (l *load) wantEndOfSockets(t *testing.T, c *cluster.Cluster) {
	pods, err := c.Pods(t.Context(), "default", "app=hostport")
	clustertest.Must(t, err)
	clustertest.Must(t, c.Apply(t.Context(), fmt.Sprintf(removed, removedClusterIP, pods[0].IP)))
	p := l.probes["pod on node0"]
	ask := probe.Request{Op: probe.Stream, Name: "removed", Netexec: true, Proto: "tcp", Dst: removedClusterIP + ":80", PauseMS: 100}
	await.True(t, "the Service with its own slice answers", func() bool {
		resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Netexec: true, Proto: "tcp", Dst: ask.Dst, TimeoutMS: 1000})
		return err == nil && resp.Answers[0].Err == probe.OK
	})
	_, err = p.Do(t.Context(), ask)
	clustertest.Must(t, err)
	time.Sleep(time.Second)
	kubectl(t, c, "--namespace=default", "delete", "endpointslice/removed")
	time.Sleep(5 * time.Second)
	resp, err := p.Do(t.Context(), probe.Request{Op: probe.Stop, Name: ask.Name})
	clustertest.Must(t, err)
	if r := resp.Report; r.Answered == 0 || len(r.Lost) == 0 || !strings.Contains(r.Lost[0], "connection abort") {
		t.Errorf("%d of %d questions answered, lost %v; want an end by ECONNABORTED", r.Answered, r.Sent, r.Lost)
	}
}

// wantChoiceByLoad opens connections that stay: each endpoint must have its share.
func (l *load) wantChoiceByLoad(t *testing.T, c *cluster.Cluster) {
	kubectl(t, c, "--namespace=default", "annotate", "service/peer", "spillway.dev/balance=least")
	defer kubectl(t, c, "--namespace=default", "annotate", "service/peer", "spillway.dev/balance-")
	agent := agents(t, c)["node0"].Name
	await.True(t, "node0 chooses by load", func() bool {
		return strings.Contains(kubectl(t, c, "exec", agent, "--", "spillway", "services", "default/peer"), "fewer active flows")
	})
	const connections = 30
	p, served := l.probes["pod on node0"], map[string]int{}
	name := func(i int) string { return fmt.Sprint("least ", i) }
	for i := range connections {
		resp, err := p.Do(t.Context(), probe.Request{Op: probe.Stream, Name: name(i), Netexec: true, Proto: "tcp",
			Dst: clustertest.ClusterIP + ":80", PauseMS: 500})
		clustertest.Must(t, err)
		served[resp.Answers[0].Server]++
	}
	for i := range connections {
		_, err := p.Do(t.Context(), probe.Request{Op: probe.Stop, Name: name(i)})
		clustertest.Must(t, err)
	}
	t.Logf("connections by endpoint: %v", served)
	for server, n := range served {
		// The load's own new connections come and go meanwhile.
		if mean := connections / len(served); n < mean-5 || n > mean+5 || len(served) < 2 {
			t.Errorf("%s has %d of %d connections: %v", server, n, connections, served)
		}
	}
}
