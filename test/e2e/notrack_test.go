package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"spillway.dev/spillway/lab/topology"
)

// cachePort is memcached's.
const cachePort = 11211

// policyPods are the pods of the cluster as manifests: which role they have.
type policyPods map[string]string

func (e *env) writePods(t *testing.T, roles policyPods) {
	t.Helper()
	var b strings.Builder
	for short, role := range roles {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: %s, labels: {role: %s}}\nspec: {nodeName: %s}\n",
			short, role+"s", role, e.NodeName(short))
		fmt.Fprintf(&b, "status: {podIP: %s, podIPs: [{ip: %s}, {ip: %s}]}\n", e.Addr(short, false), e.Addr(short, false), e.Addr(short, true))
	}
	for _, ns := range []string{"caches", "clients", "others"} {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {team: %s}}\n", ns, ns)
	}
	e.writeAll(t, "pods.yaml", b.String())
}

// writeAll writes a manifest for every node and waits until all have it applied.
func (e *env) writeAll(t *testing.T, name, text string) {
	t.Helper()
	for _, node := range e.Nodes() {
		before, err := e.Agent(node).LastSync(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Agent(node).Write(name, []byte(text)); err != nil {
			t.Fatal(err)
		}
		deadline := time.Now().Add(20 * time.Second)
		for {
			now, err := e.Agent(node).LastSync(t.Context())
			if err == nil && now.After(before) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s has not applied %s: %v\n%s", node, name, err, e.Agent(node).Tail())
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// policyYAML is a policy for caches; fields are added to its spec.
func policyYAML(name, fields, peers string) string {
	return fmt.Sprintf(`
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: %s}
spec:
  podSelector: {matchLabels: {role: cache}}
%s  ingress:
  - ports: [{port: %d}]
    from: [%s]
`, name, fields, cachePort, peers)
}

const clientPods = "{namespaceSelector: {matchLabels: {team: clients}}, podSelector: {matchLabels: {role: client}}}"

// startMemcached runs the real one on a host.
func (e *env) startMemcached(t *testing.T, short string) {
	t.Helper()
	h := e.host(t, short)
	cmd := h.Command(context.Background(), "memcached", "-u", "root", "-m", "16", "-c", "4096", "-p", fmt.Sprint(cachePort))
	if err := cmd.Start(); err != nil {
		t.Fatalf("start memcached: %v", err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	deadline := time.Now().Add(5 * time.Second)
	for e.get(t, short, e.cache(short, false), 0) != nil {
		if time.Now().After(deadline) {
			t.Fatal("memcached does not answer")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (e *env) host(t *testing.T, short string) *topology.Host {
	t.Helper()
	h, err := e.Host(short)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func (e *env) cache(short string, v6 bool) netip.AddrPort {
	return netip.AddrPortFrom(e.Addr(short, v6), cachePort)
}

// get asks a cache once, from a port of one's choice or any.
func (e *env) get(t *testing.T, from string, to netip.AddrPort, sourcePort int) error {
	t.Helper()
	conn, err := e.dial(t, from, to, sourcePort)
	if err != nil {
		return err
	}
	defer conn.Close()
	return askCache(conn)
}

func (e *env) dial(t *testing.T, from string, to netip.AddrPort, sourcePort int) (conn net.Conn, err error) {
	t.Helper()
	err = e.host(t, from).Do(func() error {
		d := net.Dialer{Timeout: 700 * time.Millisecond, LocalAddr: &net.TCPAddr{Port: sourcePort}, Control: reuse}
		conn, err = d.DialContext(t.Context(), "tcp", to.String())
		return err
	})
	return conn, err
}

func reuse(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) })
}

func askCache(conn net.Conn) error {
	_ = conn.SetDeadline(time.Now().Add(3 * time.Second))
	if _, err := conn.Write([]byte("get nothing\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && line != "END\r\n" {
		err = fmt.Errorf("memcached answers %q", line)
	}
	return err
}

// entries counts what conntrack of a node remembers of a port.
func (e *env) entries(t *testing.T, node string, port int) (n int) {
	t.Helper()
	for _, family := range []string{"ipv4", "ipv6"} {
		out := run(t, e.host(t, node), "conntrack", "-L", "-f", family, "-p", "tcp")
		for line := range strings.Lines(out) {
			if strings.Contains(line, fmt.Sprintf("port=%d ", port)) {
				n++
			}
		}
	}
	return n
}

func (e *env) forgetEntries(t *testing.T) {
	t.Helper()
	for _, node := range e.Nodes() {
		run(t, e.host(t, node), "conntrack", "-F")
	}
}

// caching is a client that asks a cache and what is to become of it.
type caching struct {
	from    string
	v6      bool
	denied  bool
	tracked bool // node a has an entry of it
}

func (e *env) expectCaching(t *testing.T, when string, cases ...caching) {
	t.Helper()
	for _, c := range cases {
		e.forgetEntries(t)
		err := e.get(t, c.from, e.cache("a0", c.v6), 0)
		if (err != nil) != c.denied {
			t.Errorf("%s: %s asks (IPv6 %v): %v, want denied %v", when, c.from, c.v6, err, c.denied)
		}
		if n := e.entries(t, "a", cachePort); (n > 0) != c.tracked {
			t.Errorf("%s: %s asks (IPv6 %v): node a has %d conntrack entries, want tracked %v", when, c.from, c.v6, n, c.tracked)
		}
	}
}

// TestDoNotTrackPolicies asks a real memcached in a pod, from pods of another node
// and from nodes, with each dataplane and each kind of policy.
func TestDoNotTrackPolicies(t *testing.T) {
	spec := topology.DefaultSpec("e2e-notrack")
	spec.Conntrack = true
	e := startSpec(t, spec)
	e.startMemcached(t, "a0")
	e.writePods(t, policyPods{"a0": "cache", "b0": "client", "b1": "other"})
	for i, mode := range []string{"nftables", "iptables", "ebpf"} {
		e.Mode = mode
		for _, node := range e.Nodes() {
			e.restart(t, node, syscall.SIGTERM, 0)
		}
		e.waitReady(t)
		e.expectCaching(t, mode+", no policy", caching{from: "b0", tracked: true}, caching{from: "b0", v6: true, tracked: true}, caching{from: "b1", tracked: true})

		e.writeAll(t, "policy.yaml", policyYAML("cache", "", clientPods))
		e.expectCaching(t, mode+", peers", caching{from: "b0"}, caching{from: "b0", v6: true},
			caching{from: "b1", tracked: true}, caching{from: "b", tracked: true})

		e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n", clientPods))
		e.expectCaching(t, mode+", deny", caching{from: "b0"}, caching{from: "b0", v6: true},
			caching{from: "b1", denied: true}, caching{from: "b1", v6: true, denied: true}, caching{from: "a", denied: true})

		if i > 0 {
			e.writeAll(t, "policy.yaml", "")
			continue
		}
		e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n  track: true\n", clientPods))
		e.expectCaching(t, mode+", track and deny", caching{from: "b0", tracked: true}, caching{from: "b1", denied: true})

		e.writeAll(t, "policy.yaml", policyYAML("cache", "  deny: others\n", fmt.Sprintf("{ipBlock: {cidr: 10.0.0.0/8, except: [%s/32]}}", e.Addr("b1", false))))
		e.expectCaching(t, mode+", ranges", caching{from: "b0"}, caching{from: "b1", denied: true}, caching{from: "b0", v6: true, denied: true})
		e.writeAll(t, "policy.yaml", "")
		e.expectCaching(t, mode+", policy gone", caching{from: "b0", tracked: true}, caching{from: "b1", tracked: true})
	}
	_ = errors.Is
	_ = os.Args
	_ = atomic.Int64{}
}
