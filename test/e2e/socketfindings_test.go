package e2e

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/testbed/topology"
)

// socketFault is a fault that clients meet, with the flags of a default agent.
type socketFault struct {
	name   string
	client string
	plant  func(t *testing.T) (s *suite.File, dst string)
	remove func(t *testing.T, s *suite.File)
	says   func(s *suite.File) []string // what doctor says of it
}

// TestDoctorFindsFaultsOfSockets: pods' sockets connect to endpoints directly, and no packet of
// theirs has a flow. A client from outside is beside them for comparison.
func TestDoctorFindsFaultsOfSockets(t *testing.T) {
	spec := topology.DefaultSpec("e2e-sockfaults")
	spec.Clients = 2
	e := startSpec(t, spec)
	if e.Mode != "ebpf" {
		t.Skip("the other dataplanes translate no sockets")
	}
	for _, f := range e.socketFaults() {
		t.Run(f.name, func(t *testing.T) { e.doctorFinds(t, f) })
	}
}

func (e *env) doctorFinds(t *testing.T, f socketFault) {
	s, dst := f.plant(t)
	want := f.says(s)
	began, stop := time.Now(), e.keepConnecting(t, f.client, dst)
	defer stop()
	found, last := map[string]bool{}, ""
	defer func() {
		if t.Failed() {
			t.Logf("doctor: %s", last)
		}
	}()
	await.True(t, "doctor finds "+f.name, func() bool {
		last = oneLine(e.doctorOfA(t))
		for _, text := range want {
			if strings.Contains(last, text) && !found[text] {
				found[text] = true
				t.Logf("doctor says %q %s after the first connection", text, time.Since(began).Round(10*time.Millisecond))
			}
		}
		return len(found) == len(want)
	})
	if f.remove != nil {
		f.remove(t, s)
		await.True(t, "doctor finds it no longer", func() bool { return !strings.Contains(oneLine(e.doctorOfA(t)), want[len(want)-1]) })
	}
}

// keepConnecting has a client connect again and again, about five times a second, until stop returns.
func (e *env) keepConnecting(t *testing.T, client, dst string) (stop func()) {
	t.Helper()
	p := e.MustProbe(t, client)
	end, ended := make(chan bool), make(chan bool)
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			default:
			}
			_, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", Dst: dst, Tries: 2, PauseMS: 200, TimeoutMS: silenceMS})
			if err != nil {
				t.Error(err)
				return
			}
		}
	}()
	return func() { close(end); <-ended }
}

// doctorOfA runs doctor on node a.
func (e *env) doctorOfA(t *testing.T) string {
	t.Helper()
	return e.run(t, "doctor", "--netns", "here", "--sample", "0", "--api-socket", e.Agent("a").Socket())
}

func (e *env) socketFaults() []socketFault {
	const silentPort = 8099 // no process listens on it
	withPort := func(target int32, endpoints ...string) flows.Service {
		return flows.Service{Endpoints: flows.On(endpoints...), Ports: []flows.Port{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80,
			Target: target}}}
	}
	client := e.Addr("a1", false).String()
	return []socketFault{
		{
			name: "WrongPort", client: "a1",
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, withPort(silentPort, "b1"))
				return s, s.MustAddress(t, flows.ClusterIP, flows.TCP4)
			},
			remove: func(t *testing.T, s *suite.File) { s.MustWrite(t, withPort(8080, "b1")); s.MustWait(t) },
			says: func(s *suite.File) []string {
				return []string{"/b1 (" + e.Addr("b1", false).String() + ":8099) refuses them",
					"connections to Service " + e.nameOfService(s) + ":tcp fail", "the last one of " + client, "no process listens on this port"}
			},
		},
		{
			name: "DropsInPod", client: "a1",
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, withPort(8080, "a0"))
				e.Output(t, "a0", "nft", "table inet theirs { chain in { type filter hook input priority 0; tcp dport 8080 drop; }; }")
				t.Cleanup(func() { e.Output(t, "a0", "sh", "-c", "nft delete table inet theirs || true") })
				return s, s.MustAddress(t, flows.ClusterIP, flows.TCP4)
			},
			remove: func(t *testing.T, _ *suite.File) { e.Output(t, "a0", "nft", "delete table inet theirs") },
			says: func(s *suite.File) []string {
				return []string{e.Addr("a0", false).String() + ":8080", "does not answer", // two cases name its pod
					"connections to Service " + e.nameOfService(s) + ":tcp fail", "the last one of " + client}
			},
		},
		{
			name: "NoEndpoints", client: "a1",
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, withPort(8080))
				return s, s.MustAddress(t, flows.ClusterIP, flows.TCP4)
			},
			remove: func(t *testing.T, s *suite.File) { s.MustWrite(t, withPort(8080, "b1")); s.MustWait(t) },
			says: func(s *suite.File) []string {
				return []string{"clients connect to " + e.nameOfService(s) + ":tcp, which has no endpoint: its selector matches no ready Pod",
					"the last client is a process in the cgroup", "/pod1"}
			},
		},
		{
			name: "SourceRange", client: "client0",
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, AllowFrom: []string{"client1"},
					Endpoints: flows.On("b0")})
				return s, s.MustAddress(t, flows.LoadBalancer("a"), flows.TCP4)
			},
			says: func(s *suite.File) []string {
				return []string{"Service " + e.nameOfService(s) + ":tcp refuses 1 client by loadBalancerSourceRanges",
					"allowed: " + e.Addr("client1", false).String() + "/32", "from " + e.Addr("client0", false).String()}
			},
		},
	}
}
