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

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/flows/probe"
)

// load is running streams of questions to the peers' Service. None may be lost.
type load struct {
	probes  map[string]*probe.Process
	servers map[string]int // processes of the Pods that serve, by the Pods' names
	streams []stream
}

// stream is one of them.
type stream struct{ name, from string }

// startAskers starts the askers: outside, on a node, and in Pods on other nodes than
// node2.
func startAskers(t *testing.T, c *cluster.Cluster) *load {
	t.Helper()
	l := &load{probes: map[string]*probe.Process{}}
	pods, err := c.PodOfEachNode(t.Context(), "default", "app=peer")
	clustertest.Must(t, err)
	if len(pods) != 2 {
		t.Fatalf("%d Pods ask, want 2", len(pods))
	}
	for node, pod := range pods {
		cmd, done, err := pod.Command(context.Background(), os.Args[0], probe.Arg)
		l.add(t, "pod on "+node, cmd, err)
		done()
	}
	l.add(t, "client0", c.Client().Command(context.Background(), os.Args[0], probe.Arg), nil)
	l.add(t, "node1", c.Node(1).Host().Command(context.Background(), os.Args[0], probe.Arg), nil)
	_, err = l.probes["client0"].Do(t.Context(), probe.Request{Op: probe.Serve, Server: "outside", Listen: []string{
		"tcp " + outsideServer(c), "udp " + outsideServer(c),
	}})
	clustertest.Must(t, err)
	return l
}

// outsideServer is the address of a server outside of the cluster, on client0. Pods reach it with the node's address.
func outsideServer(c *cluster.Cluster) string {
	return netip.AddrPortFrom(c.Client().IPv4, 8080).String()
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
			await.True(t, from+" is answered over "+proto, func() bool {
				resp, err := p.Do(t.Context(), probe.Request{
					Op: probe.Try, Netexec: true, Proto: proto, Dst: l.service(c, from), Tries: 10, TimeoutMS: 1000,
				})
				return err == nil && !slices.ContainsFunc(resp.Answers, func(a probe.Answer) bool { return a.Err != probe.OK })
			})
		}
	}
}

// start starts the streams: each protocol, on one socket and on a new one for each
// question, from outside, from Pods and from a node. It leaves out the named streams.
func (l *load) start(t *testing.T, c *cluster.Cluster, without ...string) {
	t.Helper()
	pods, err := c.Pods(t.Context(), "default", "service=peer")
	clustertest.Must(t, err)
	l.servers = map[string]int{}
	for _, pod := range pods {
		l.servers[pod.Name] = pod.PID()
	}
	for from := range l.probes {
		for _, proto := range []string{"tcp", "udp", "new-tcp", "new-udp"} {
			if name := proto + " from " + from; !slices.Contains(without, name) {
				l.streamPeer(t, from, probe.Request{Name: name, Proto: proto, Dst: l.service(c, from)})
			}
			if strings.HasPrefix(from, "pod ") {
				l.stream(t, from, probe.Request{Name: proto + " to the outside from " + from, Proto: proto, Dst: outsideServer(c)})
			}
		}
	}
}

// streamPeer starts a stream to the peers' Service.
func (l *load) streamPeer(t *testing.T, from string, req probe.Request) (server string) {
	t.Helper()
	req.Netexec, req.Processes = true, l.servers
	return l.stream(t, from, req)
}

// stream starts one stream, and returns the Pod that answers its first question.
func (l *load) stream(t *testing.T, from string, req probe.Request) (server string) {
	t.Helper()
	req.Op, req.PauseMS = probe.Stream, max(req.PauseMS, 10)
	resp, err := l.probes[from].Do(t.Context(), req)
	if err != nil {
		t.Fatalf("start %s: %v", req.Name, err)
	}
	server = resp.Answers[0].Server
	l.streams = append(l.streams, stream{req.Name, from})
	return server
}

// service returns the address that a host or Pod asks: client0 knows nodes alone.
func (l *load) service(c *cluster.Cluster, from string) string {
	if from == "client0" {
		return outside(c, 1)
	}
	return clustertest.ClusterIP + ":80"
}

// outside returns the Service's address on a node.
func outside(c *cluster.Cluster, node int) string {
	return netip.AddrPortFrom(c.Node(node).Host().IPv4, clustertest.NodePort).String()
}

// excuse is for streams that may lose questions.
type excuse struct {
	streams string // first part of their names
	most    int    // questions that each may lose
	moved   bool   // another server must answer it since
}

func (e excuse) covers(name string, r *probe.Report) bool {
	return strings.HasPrefix(name, e.streams) && r.Sent-r.Answered <= e.most && (!e.moved || len(r.Servers) > 1)
}

// end ends the streams and reports every loss that no excuse covers.
func (l *load) end(t *testing.T, excuses ...excuse) {
	t.Helper()
	sent, lost, ended := 0, 0, 0
	for _, s := range l.streams {
		resp, err := l.probes[s.from].Do(context.Background(), probe.Request{Op: probe.Stop, Name: s.name})
		if err != nil {
			t.Fatal(err)
		}
		r := resp.Report
		sent, lost, ended = sent+r.Sent, lost+r.Sent-r.Answered, ended+r.Ended
		if r.Sent == r.Answered {
			continue
		}
		message := fmt.Sprintf("%s: %d of %d questions were lost, others answered by %v: %v", s.name, r.Sent-r.Answered,
			r.Sent, r.Servers, r.Lost)
		if slices.ContainsFunc(excuses, func(e excuse) bool { return e.covers(s.name, r) }) {
			t.Log(message)
		} else {
			t.Error(message)
		}
	}
	t.Attr("lost", strconv.Itoa(lost))
	t.Attr("questions", strconv.Itoa(sent))
	t.Logf("%d of %d questions in %d streams were lost; %d connections ended with their server", lost, sent, len(l.streams), ended)
	l.streams = nil
}
