package e2e

import (
	"flag"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// ejectionClients reach a Service through the tc programs of node a, and through socket hooks.
var ejectionClients = []flows.Flow{{From: "client0", To: flows.NodePort("a")}, {From: "a1", To: flows.ClusterIP}}

// e2eOutlier starts a cluster with a Service whose endpoints may be ejected.
func e2eOutlier(t *testing.T, name string) (*env, *suite.File) {
	t.Helper()
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec(name),
		Flags: map[string][]string{"": {"--outlier-ejection"}}})}
	if e.Mode == "iptables" {
		t.Skip("iptables does not count the handshakes of endpoints")
	}
	return e, e.Load(t, flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("a0", "a2", "b0", "b1"),
		Annotations: map[string]string{intent.OutlierEjectionAnnotation: "true"}})
}

// TestOutlierEjection cuts the link of a node with half of a Service's endpoints. Clients
// must reach the others alone, through tc programs and through socket hooks, and all of them
// when the link is back.
func TestOutlierEjection(t *testing.T) {
	e, s := e2eOutlier(t, "e2e-outlier")
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6} {
		for _, c := range ejectionClients {
			if m := e.connectMany(t, c, s.MustAddress(t, c.To, combo), combo, patienceMS); m.failed > 0 {
				t.Fatalf("%s to %s, %s: %d connections failed before the link was cut", c.From, c.To, combo, m.failed)
			}
		}
	}
	e.setLink(t, "b", "down")
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6} {
		for _, c := range ejectionClients {
			began := time.Now()
			dst := s.MustAddress(t, c.To, combo)
			lastFail := began
			await.NoError(t, func() error {
				m := e.connectMany(t, c, dst, combo, connectMS)
				if m.failed == 0 {
					return nil
				}
				lastFail = m.lastFail
				return fmt.Errorf("%s to %s, %s: %d connections fail", c.From, c.To, combo, m.failed)
			})
			t.Logf("%s to %s, %s: the last connection that failed began %s after the first one", c.From, c.To, combo,
				lastFail.Sub(began).Round(time.Millisecond))
		}
	}
	if text := oneLine(e.spillway(t, "a", "status", "-o", "wide")); !strings.Contains(text, "gets no new connections for a while") {
		t.Errorf("status does not name the endpoints: %s", text)
	}
	e.setLink(t, "b", "up")
	for _, c := range ejectionClients {
		dst, served := s.MustAddress(t, c.To, flows.TCP4), map[string]bool{}
		await.True(t, fmt.Sprintf("%s to %s: answers after the link is back", c.From, c.To), func() bool {
			for server := range e.connectMany(t, c, dst, flows.TCP4, connectMS).servers {
				served[server] = true
			}
			return served["b0"] && served["b1"]
		})
		if len(served) != 4 {
			t.Errorf("%s to %s: answers of %v after the link is back", c.From, c.To, served)
		}
	}
}

// setLink cuts a node's link at the other end, so that the node keeps its routes.
func (e *env) setLink(t *testing.T, node, state string) {
	t.Helper()
	e.OnLAN(t, "", "ip", "link", "set", e.MustHost(t, node).Name, state)
}

var lossFor = flag.Duration("loss-for", 10*time.Second, "how long TestNoEjectionWithLoss connects")

// TestNoEjectionWithLoss loses 1 % of all packets between the nodes. No endpoint may be
// ejected.
func TestNoEjectionWithLoss(t *testing.T) {
	e, s := e2eOutlier(t, "e2e-loss")
	e.OnLAN(t, `table bridge lossy {
	chain forward {
		type filter hook forward priority 0; policy accept;
		numgen random mod 100 == 0 drop
	}
}
`, "nft", "-f", "-")
	connections, failed := 0, 0
	for end := time.Now().Add(*lossFor); time.Now().Before(end); {
		for _, c := range ejectionClients {
			m := e.connectMany(t, c, s.MustAddress(t, c.To, flows.TCP4), flows.TCP4, connectMS)
			connections, failed = connections+manyConnections, failed+m.failed
		}
		if text := oneLine(e.spillway(t, "a", "status", "-o", "wide")); strings.Contains(text, "new connections") {
			t.Fatalf("after %d connections an endpoint is ejected: %s", connections, text)
		}
	}
	t.Logf("%d connections, of which %d took longer than %d ms", connections, failed, connectMS)
	if failed == 0 && connections > 5000 {
		t.Error("nothing was lost")
	}
}

// many is what manyConnections connections came to.
type many struct {
	servers  map[string]bool
	failed   int
	lastFail time.Time // when the last one that failed began
}

// connectMS is how long a connection may take. The first SYN that is repeated follows after
// a second.
const connectMS = 500

const (
	manyConnections = 64
	manyAtOnce      = 16
)

// connectMany opens manyConnections connections, manyAtOnce at a time, and waits timeoutMS
// milliseconds for each.
func (e *env) connectMany(t *testing.T, c flows.Flow, dst string, combo flows.Combo, timeoutMS int) many {
	t.Helper()
	p := e.MustProbe(t, c.From)
	out := many{servers: map[string]bool{}}
	var mu sync.Mutex
	connect := func() {
		began := time.Now()
		for _, a := range askFor(t, p, dst, combo, 1, timeoutMS) {
			mu.Lock()
			if a.Server != "" {
				out.servers[a.Server] = true
			} else {
				out.failed++
				if began.After(out.lastFail) {
					out.lastFail = began
				}
			}
			mu.Unlock()
		}
	}
	var wg sync.WaitGroup
	for range manyAtOnce {
		wg.Go(func() {
			for range manyConnections / manyAtOnce {
				connect()
			}
		})
	}
	wg.Wait()
	return out
}
