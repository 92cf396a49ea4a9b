package demo

import (
	"io/fs"
	"net/netip"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"spillway.dev/spillway/examples"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/workload"
)

func files(t *testing.T) fs.FS {
	t.Helper()
	f, err := fs.Sub(examples.Demo, "demo")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// The manifests, the plan of the lab's addresses and an agent's reading of both must
// agree, or the demo proves nothing.
func TestManifestsFitTheCluster(t *testing.T) {
	cluster, delta := fixture.Manifests(t, "demotest", func(r *harness.Harness) (string, error) { return writeManifests(r, files(t)) })
	for _, want := range cluster.Nodes() {
		if diff := cmp.Diff(want, delta.Nodes[want.Name], cmp.Comparer(sameAddr), cmp.Comparer(samePrefix)); diff != "" {
			t.Errorf("Node %s (-planned +manifest):\n%s", want.Name, diff)
		}
	}
	o, err := readObjects(files(t))
	if err != nil {
		t.Fatal(err)
	}
	servers, err := o.servers(cluster)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range servers {
		got = append(got, s.host.Name+" "+s.kind)
	}
	want := []string{"node0-pod1 udp", "node1-pod1 udp", "node0-pod0 http", "node1-pod0 http"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("servers (-want +got):\n%s", diff)
	}
	checkProbes(t, probes(o, cluster))
}

func sameAddr(a, b netip.Addr) bool     { return a == b }
func samePrefix(a, b netip.Prefix) bool { return a == b }

// checkProbes checks that the probes cover every path, both families and both Services.
func checkProbes(t *testing.T, all []*Probe) {
	t.Helper()
	ways := map[string]int{}
	for _, v := range all {
		family := "IPv4"
		if v.Address.Addr().Is6() {
			family = "IPv6"
		}
		ways[v.Protocol+" "+family+" "+v.Way+" from "+v.From]++
	}
	for _, protocol := range []string{"TCP", "UDP"} {
		for _, family := range []string{"IPv4", "IPv6"} {
			for _, way := range []string{"ClusterIP from node0-pod2", "ClusterIP from node1", "NodePort of node0 from client0",
				"NodePort of node1 from client0", "external IP from client0", "LoadBalancer IP from client0"} {
				name := protocol + " " + family + " " + way
				if ways[name] != 1 {
					t.Errorf("%s is asked %d times, want once", name, ways[name])
				}
				delete(ways, name)
			}
		}
	}
	if len(ways) > 0 {
		t.Errorf("unexpected ways: %v", ways)
	}
}

func TestReadObjectsSaysWhere(t *testing.T) {
	bad := fstest.MapFS{"x.yaml": {Data: []byte("apiVersion: v1\nkind: Node\n---\nkind: Service\nspec: {clusterAddress: 10.0.0.1}\n")}}
	if _, err := readObjects(bad); err == nil || !strings.Contains(err.Error(), "x.yaml, document 2") ||
		!strings.Contains(err.Error(), "clusterAddress") {
		t.Errorf("error is %v", err)
	}
	other := fstest.MapFS{"x.yaml": {Data: []byte("kind: Pod\n")}}
	if _, err := readObjects(other); err == nil || !strings.Contains(err.Error(), `"Pod"`) {
		t.Errorf("error is %v", err)
	}
	if _, err := readObjects(fstest.MapFS{}); err == nil {
		t.Error("no files: no error")
	}
}

func probeOf(outcomes ...workload.Answer) *Probe {
	hosts := map[netip.Addr]string{netip.MustParseAddr("172.30.0.200"): "client0"}
	v := &Probe{Service: "web", Protocol: "TCP", Way: "NodePort of node0", From: "client0",
		Address: netip.MustParseAddrPort("172.30.0.10:30080")}
	for _, a := range outcomes {
		v.note(a, hosts)
	}
	return v
}

func answer(server, client string) workload.Answer {
	return workload.Answer{Outcome: workload.Answered, Server: server, Client: netip.MustParseAddrPort(client)}
}

func testReport() *Report {
	good := probeOf(answer("node1-pod0", "10.0.0.9:1"), answer("node0-pod0", "172.30.0.200:1"),
		answer("node0-pod0", "[::ffff:172.30.0.200]:2"))
	bad := probeOf(answer("node0-pod0", "172.30.0.200:1"), workload.Answer{Outcome: workload.Refused},
		workload.Answer{Outcome: workload.Refused})
	bad.Way, bad.Address = "external IP", netip.MustParseAddrPort("[2001:db8:ff::10]:80")
	r := &Report{Mode: "ebpf", Visits: []*Probe{good, bad}, Machine: experiment.Machine{Kernel: "6.1.0", Arch: "x86_64",
		CPU: "Fast CPU", Cores: 2, Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)}}
	sample := func(rate float64, entries int) harness.Sample {
		s := harness.Sample{Conntrack: entries}
		s.Kind, s.Rate, s.Requests = load.HTTP, rate, int64(rate)
		s.Latency = load.Latency{P50: 1e6 / rate, P99: 2e6 / rate, P999: 3e6 / rate}
		return s
	}
	metal := []harness.Sample{sample(30000, 32), sample(20000, 33)}
	lost := sample(18000, 0)
	lost.Errors = map[string]int64{"timeout": 1}
	for _, kind := range []load.Kind{load.HTTP, load.Conn} {
		of := func(path string, samples ...harness.Sample) {
			s := newSpeed(path, metal, samples)
			s.Kind = kind
			r.Speeds = append(r.Speeds, s)
		}
		of(toMetal, metal...)
		of(toNodePort, sample(29400, 0), sample(19600, 0))
		of(podToPod, sample(30000, 9344), sample(20000, 12))
		of(toClusterIP, sample(31000, 0), lost)
	}
	return r
}

func TestReportTable(t *testing.T) {
	clitest.Pages(t, "report", testReport())
}

func TestAddressesThatDoNotAnswerAreAnError(t *testing.T) {
	r := testReport()
	want := "ask Service addresses: 1 of 2 did not answer: TCP [2001:db8:ff::10]:80 from client0"
	if err := r.unanswered(); err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
	r.Visits = r.Visits[:1]
	if err := r.unanswered(); err != nil {
		t.Errorf("all answered: %v", err)
	}
}

func TestValidateKeepsTheDemoShort(t *testing.T) {
	if err := (Config{Rounds: 4, Duration: time.Second}).Validate(); err != nil {
		t.Error(err)
	}
	for _, bad := range []Config{{Rounds: 0, Duration: time.Second}, {Rounds: 1}, {Rounds: 20, Duration: time.Second}} {
		if bad.Validate() == nil {
			t.Errorf("%d rounds of %v: no error", bad.Rounds, bad.Duration)
		}
	}
}
