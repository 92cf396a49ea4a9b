package life

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/flows/probe"
)

// peers are a Pod on node0 and on node1, which serve and ask, and their Service. Nothing
// of the load needs node2.
const peers = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: peer}
spec:
  selector: {matchLabels: {app: peer}}
  template:
    metadata: {labels: {app: peer}}
    spec:
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: NotIn, values: [node2]}]}]
      containers: [{name: peer, image: %s, imagePullPolicy: Never, args: [pause]}]
---
apiVersion: v1
kind: Service
metadata: {name: peer}
spec:
  type: NodePort
  clusterIP: 10.96.7.7
  selector: {app: peer}
  ports:
    - {name: tcp, port: 80, targetPort: 8080, nodePort: %[2]d, protocol: TCP}
    - {name: udp, port: 80, targetPort: 8080, nodePort: %[2]d, protocol: UDP}
`

const nodePort = 30080

// load is running streams of questions to a Service. None may be lost.
type load struct {
	probes  map[string]*probe.Process
	streams []stream
}

type stream struct{ name, from string }

// startPeers starts the servers and the askers.
func startPeers(t *testing.T, c *cluster.Cluster) *load {
	t.Helper()
	ctx := t.Context()
	l := &load{probes: map[string]*probe.Process{}}
	pods, err := c.Pods(ctx, "default", "app=peer")
	if err != nil {
		t.Fatal(err)
	}
	if len(pods) != 2 {
		t.Fatalf("%d Pods serve, want 2", len(pods))
	}
	for node, pod := range pods {
		cmd, done, err := pod.Command(context.Background(), os.Args[0], probe.Arg)
		l.add(t, "pod on "+node, cmd, err)
		done()
		_, err = l.probes["pod on "+node].Do(ctx, probe.Request{Op: probe.Serve, Server: node, Listen: []string{"tcp [::]:8080", "udp [::]:8080"}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, host := range map[string]interface {
		probe.Command
	}{
		"client0": c.Client().Command(context.Background(), os.Args[0], probe.Arg),
		"node1":   c.Node(1).Host().Command(context.Background(), os.Args[0], probe.Arg),
	} {
		l.add(t, name, host, nil)
	}
	return l
}

func (l *load) add(t *testing.T, name string, cmd probe.Command, err error) {
	t.Helper()
	if err == nil {
		l.probes[name], err = probe.Start(name, cmd)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.probes[name].Close() })
}

// settle waits until the proxy has written the Service on each node.
func (l *load) settle(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	for from, p := range l.probes {
		for _, proto := range []string{"tcp", "udp"} {
			waitUntil(t, from+" is answered over "+proto, func() bool {
				resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: proto, Dst: l.service(c, from), Tries: 10, TimeoutMS: 1000})
				return err == nil && !slices.ContainsFunc(resp.Answers, func(a probe.Answer) bool { return a.Err != probe.OK })
			})
		}
	}
}

// start starts the streams: each protocol, on one socket and on a new one for each
// question, from outside, from Pods and from a node.
func (l *load) start(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	for from := range l.probes {
		for _, proto := range []string{"tcp", "udp", "new-tcp", "new-udp"} {
			s := stream{fmt.Sprintf("%s from %s", proto, from), from}
			_, err := l.probes[from].Do(t.Context(), probe.Request{Op: probe.Stream, Name: s.name, Proto: proto, Dst: l.service(c, from), PauseMS: 10})
			if err != nil {
				t.Fatalf("start %s: %v", s.name, err)
			}
			l.streams = append(l.streams, s)
		}
	}
}

// service returns the address that a host or Pod asks: client0 knows nodes alone.
func (l *load) service(c *cluster.Cluster, from string) string {
	if from == "client0" {
		return netip.AddrPortFrom(c.Node(1).Host().IPv4, nodePort).String()
	}
	return "10.96.7.7:80"
}

// end ends the streams and reports every loss of those that except does not name.
func (l *load) end(t *testing.T, except ...string) {
	t.Helper()
	sent, lost := 0, 0
	for _, s := range l.streams {
		resp, err := l.probes[s.from].Do(context.Background(), probe.Request{Op: probe.Stop, Name: s.name})
		if err != nil {
			t.Fatal(err)
		}
		r := resp.Report
		sent, lost = sent+r.Sent, lost+r.Sent-r.Answered
		if r.Sent == r.Answered {
			continue
		}
		excused := false
		for _, e := range except {
			excused = excused || strings.HasPrefix(s.name, e)
		}
		message := fmt.Sprintf("%s: %d of %d questions were lost: %v", s.name, r.Sent-r.Answered, r.Sent, r.Lost)
		if excused {
			t.Log(message)
		} else {
			t.Error(message)
		}
	}
	t.Attr("lost", strconv.Itoa(lost))
	t.Attr("questions", strconv.Itoa(sent))
	t.Logf("%d of %d questions in %d streams were lost", lost, sent, len(l.streams))
	l.streams = nil
}
