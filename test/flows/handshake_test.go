package flows_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// firstDeafPort is the first of the ports on which pods a0 and b0 drop SYNs.
const firstDeafPort, lastDeafPort = 9000, 9999

// TestHandshakesFollowTheirService: an endpoint does not answer, and is replaced by another one while
// its client waits in connect(). The client's next SYN goes to the other one. Each flow has a Service,
// and a port that the first endpoint drops, of its own. Beside them, changesAndHandshakes.
func TestHandshakesFollowTheirService(t *testing.T) {
	s := spec("flows-handshake", topology.Routed)
	s.Conntrack = true
	h := harness.Start(t, cluster.Config{Spec: s})
	for _, deaf := range []string{"a0", "b0"} {
		deafen(t, h, deaf)
	}
	t.Run("Changes", func(t *testing.T) {
		t.Parallel()
		changesAndHandshakes(t, h)
	})
	port := int32(firstDeafPort)
	for _, old := range []string{"a0", "b0"} {
		for _, f := range []flows.Flow{
			{From: "client0", To: flows.NodePort("a")},
			{From: "a1", To: flows.ClusterIP},
			{From: "a1/vm", To: flows.ClusterIP},
			{From: "a", To: flows.ClusterIP},
		} {
			for _, combo := range flows.TCP {
				shake := handshake{h: h, old: old, f: f, combo: combo, port: port}
				port++
				t.Run(fmt.Sprintf("instead of %s/%s to %s/%s", old, strings.ReplaceAll(f.From, "/", " "), f.To, combo), func(t *testing.T) {
					t.Parallel()
					shake.run(t)
				})
			}
		}
	}
}

// deafen has a pod drop SYNs, and remember their ports.
func deafen(t *testing.T, h *harness.Harness, pod string) {
	t.Helper()
	rules := fmt.Sprintf(`table inet deaf {
	set seen {
		type inet_service
		size %d
		flags dynamic
	}
	chain input {
		type filter hook input priority 0;
		tcp dport %d-%d tcp flags syn update @seen { tcp dport } drop
	}
}`, lastDeafPort-firstDeafPort+1, firstDeafPort, lastDeafPort)
	cmd := h.MustHost(t, pod).Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("load rules in %s: %v: %s", pod, err, out)
	}
}

// handshake is a connect() to a Service whose endpoint drops the port.
type handshake struct {
	h     *harness.Harness
	old   string
	f     flows.Flow
	combo flows.Combo
	port  int32
}

// service returns the handshake's Service.
func (s *handshake) service(on string, target int32) flows.Object {
	family := "4"
	if s.combo.IPv6() {
		family = "6"
	}
	return flows.Service{
		Type: corev1.ServiceTypeNodePort, Families: family, Endpoints: flows.On(on),
		Ports: []flows.Port{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: target}},
	}
}

// heard returns an error until the old endpoint has dropped a SYN.
func (s *handshake) heard(t *testing.T) error {
	out, err := s.h.MustHost(t, s.old).Command(t.Context(), "nft", "list", "set", "inet", "deaf", "seen").Output()
	if err == nil && !strings.Contains(string(out), fmt.Sprint(s.port)) {
		err = fmt.Errorf("%s has received no SYN to port %d", s.old, s.port)
	}
	return err
}

func (s *handshake) run(t *testing.T) {
	// The connect hook has translated a socket of the node, and no packet of it passes a program.
	byHook := s.f.From == "a" && s.h.ModeOf("a") == "ebpf"
	if err := kernel.ProbeSocketIterators(); byHook && errors.Is(err, os.ErrPermission) {
		t.Skip(err) // no agent can find the socket
	}
	file := s.h.Load(t, s.service(s.old, s.port))
	p, err := s.h.Probe(s.f.From)
	if err != nil {
		t.Fatal(err)
	}
	dst := file.MustAddress(t, s.f.To, s.combo)
	asked := make(chan error, 1)
	var answer probe.Answer
	ask := func() error {
		// A client repeats its SYN after 1, 3, 7, 15, 31 and 63 s.
		resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", Dst: dst, TimeoutMS: int(time.Minute / time.Millisecond)})
		if err == nil {
			answer = resp.Answers[0]
		}
		return err
	}
	go func() { asked <- ask() }()
	await.NoError(t, func() error { return s.heard(t) })
	file.MustWrite(t, s.service("c0", 8080))
	if err := <-asked; err != nil {
		t.Fatal(err)
	}
	if byHook {
		if !strings.Contains(answer.Detail, unix.ECONNABORTED.Error()) {
			t.Errorf("answer %+v, want %v", answer, unix.ECONNABORTED)
		}
		if err := errors.Join(file.Wait(t.Context()), ask()); err != nil {
			t.Fatal(err)
		}
	}
	if answer.Err != probe.OK || answer.Server != "c0" || answer.Peer != dst {
		t.Errorf("answer %+v, want one of c0, and %s as peer", answer, dst)
	}
}
