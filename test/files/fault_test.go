package files

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/testbed/sysctl"
)

// TestTFTPFaults has clients, servers and agents misbehave while files are read.
func TestTFTPFaults(t *testing.T) {
	size := fmt.Sprint("=", flowTable)
	r := start(t, "files-faults", "--conntrack-min"+size, "--conntrack-max-per-core=1")
	for _, on := range []string{"a0", "b0"} {
		tftpServers[0].start(t, r, on)
		r.WaitListening(t, on, "udp", 69, true)
	}
	r.offer(t, "f5120", 5120)
	r.offer(t, "f100000", 100_000)
	local := service("local", corev1.ProtocolUDP, 69, "a0", "b0")
	local.ExternalLocal = true
	sticky := service("sticky", corev1.ProtocolUDP, 69, "a0", "b0")
	sticky.Affinity = time.Hour
	s := r.Load(t, service("here", corev1.ProtocolUDP, 69, "a0"), service("there", corev1.ProtocolUDP, 69, "b0"),
		service("dead", corev1.ProtocolUDP, 69, "a1"), local, sticky)
	t.Run("Policies", func(t *testing.T) { r.policies(t, s) })
	t.Run("BadRequests", func(t *testing.T) { r.badRequests(t, s) })
	t.Run("ThirdHost", func(t *testing.T) { r.thirdHost(t, s) })
	t.Run("Restart", func(t *testing.T) { r.restarts(t, s) })
	t.Run("Counted", func(t *testing.T) { r.counted(t, s) })
	t.Run("Flood", func(t *testing.T) { r.flood(t, s) })
	t.Run("FloodOfExpectations", func(t *testing.T) { r.floodOfExpectations(t, s) })
	t.Run("LeavesNothing", func(t *testing.T) { r.leavesNothing(t, s) })
	t.Run("EndpointGoes", func(t *testing.T) { r.endpointGoes(t, s) })
	t.Run("EndpointDies", func(t *testing.T) { r.endpointDies(t, s) })
}

// outside are the ways of a client outside, by the Service's name.
var outside = map[string]flows.Target{
	"here": flows.NodePort("a").Of("here"), "there": flows.NodePort("a").Of("there"),
}

// policies: a transfer stays with its endpoint, whatever chose it.
func (h *files) policies(t *testing.T, s *suite.File) {
	for _, node := range []string{"a", "b"} {
		for _, name := range []string{"local", "sticky"} {
			for _, combo := range flows.UDP {
				for range 4 {
					x := h.begin(t, "client0", address(t, s, flows.NodePort(node).Of(name), combo), "f5120")
					x.finish(t, name+" at "+node, "f5120", 5120)
				}
			}
		}
	}
}

// badRequests: what makes no sense is the server's to refuse, and changes nothing
// for others.
func (h *files) badRequests(t *testing.T, s *suite.File) {
	bad := map[string][]byte{
		"nothing": {}, "one byte": {0}, "no NUL": []byte("\x00\x01file"), "no mode": []byte("\x00\x01file\x00"),
		"empty name": request(""), "unknown opcode": []byte("\x00\x4dfile\x00octet\x00"), "data": []byte("\x00\x03\x00\x01abc"),
		"an error": []byte("\x00\x05\x00\x00no\x00"), "64 KB name": request(strings.Repeat("x", 65_000)),
		"name of blocks": request(strings.Repeat("../", 400)), "options without end": []byte("\x00\x01f5120\x00octet\x00blksize\x00"),
	}
	for way, to := range outside {
		for _, combo := range flows.UDP {
			server := address(t, s, to, combo)
			for what, b := range bad {
				conn := h.socket(t, "client0")
				if err := send(conn, server, b); err != nil {
					t.Errorf("%s: %v", what, err)
				}
				// The same port may ask for something sensible next.
				_ = conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
				for buf := make([]byte, 2048); ; {
					if _, _, err := conn.ReadFrom(buf); err != nil {
						break // it may have been answered with an error, or several
					}
				}
				x, err := begin(conn, server, "f5120")
				for range 2 { // a busy machine's answer to what was bad may come only now
					if err != nil {
						x, err = begin(conn, server, "f5120")
					}
				}
				if err != nil {
					t.Errorf("%s, %s, after %s: %v", way, combo, what, err)
					continue
				}
				x.late = true
				x.finish(t, fmt.Sprintf("%s, %s, after %s", way, combo, what), "f5120", 5120)
			}
		}
	}
	for _, node := range h.Nodes() {
		if err := h.Agent(node).Ended(); err != nil {
			t.Error(err)
		}
		if d := h.drops(t, node); d != "" {
			t.Errorf("packets were dropped on %s: %s", node, d)
		}
	}
}

// thirdHost: another client cannot send to the server in a foreign transfer, and the
// client does not receive packets of another pod as the server's.
func (h *files) thirdHost(t *testing.T, s *suite.File) {
	for way, to := range outside {
		for _, combo := range flows.UDP {
			x := h.begin(t, "client0", address(t, s, to, combo), "f5120")
			stranger := h.socket(t, "client1")
			for _, b := range [][]byte{{0, 4, 0, 9}, {0, 5, 0, 0, 'x', 0}, request("f100000")} {
				if err := send(stranger, x.tid, b); err != nil {
					t.Logf("%s: %v", way, err) // refused already
				}
			}
			buf := make([]byte, 2048)
			_ = stranger.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			if n, from, err := stranger.ReadFrom(buf); err == nil {
				t.Errorf("%s, %s: %s answers a stranger: %q", way, combo, from, buf[:n])
			}
			x.finish(t, way+" with a stranger", "f5120", 5120)
		}
	}
}

// restarts: what runs in the kernel goes on while agents are ended and started.
func (h *files) restarts(t *testing.T, s *suite.File) {
	var open []*transfer
	for _, to := range outside {
		for _, combo := range flows.UDP {
			open = append(open, h.begin(t, "client0", address(t, s, to, combo), "f100000"))
		}
	}
	step := func(when string) {
		t.Helper()
		for _, x := range open {
			for range 3 {
				if err := x.step(); err != nil {
					t.Fatalf("%s, from %s: %v", when, x.server, err)
				}
			}
		}
	}
	step("before")
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		for _, node := range h.Nodes() {
			if err := h.Agent(node).Signal(sig); err != nil {
				t.Fatal(err)
			}
		}
		step(fmt.Sprintf("after %v", sig))
		for _, node := range h.Nodes() {
			if err := h.Agent(node).Start(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		step("while agents start")
		for _, node := range h.Nodes() {
			if err := h.Agent(node).WaitReady(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		step("after a restart")
	}
	for _, x := range open {
		x.finish(t, "after all restarts", "f100000", 100_000)
	}
}

// floodSize is how many requests one host sends to a server that is not there:
// more than the table of flows has room for. For the kernel's helpers it is far
// fewer: floodOfExpectations is about more.
func (h *files) floodSize() int {
	if h.Mode == "ebpf" {
		return 5 * flowTable
	}
	return 200
}

// flowTable is the size of the agents' table of flows, the least there is.
const flowTable = 4096

// flood: requests to a dead server are bounded in what they take, and others'
// transfers go on, the open ones and new ones.
func (h *files) flood(t *testing.T, s *suite.File) {
	open := h.begin(t, "client0", address(t, s, outside["there"], flows.UDP4), "f100000")
	machine, err := h.Host("client1")
	if err != nil {
		t.Fatal(err)
	}
	dead := address(t, s, flows.NodePort("a").Of("dead"), flows.UDP4)
	ended := make(chan error, 1)
	go func() {
		ended <- machine.Do(func() error { return floodFrom(dead, h.floodSize()) })
	}()
	for running := true; running; {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			running = false
		default:
		}
		if !open.done {
			if err := open.step(); err != nil {
				t.Fatalf("an open transfer under a flood: %v", err)
			}
		}
		x := h.begin(t, "client0", address(t, s, outside["here"], flows.UDP4), "f5120")
		x.finish(t, "under a flood", "f5120", 5120)
		x.conn.Close()
	}
	open.finish(t, "after a flood", "f100000", 100_000)
	if h.Mode != "ebpf" {
		return
	}
	if d := h.drops(t, "a"); d != "" {
		t.Errorf("packets were dropped: %s", d)
	}
}

// floodOfExpectations: the kernel's helpers make an expectation of each request, in
// one table for all. A flood fills it and no more: it is counted, transfers that have
// begun go on, and when there is room again, others are served at once.
func (h *files) floodOfExpectations(t *testing.T, s *suite.File) {
	if h.Mode == "ebpf" {
		return // there are none
	}
	release, err := sysctl.Exclude()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	text, err := h.client(t.Context(), "a", "cat", "/proc/sys/net/netfilter/nf_conntrack_expect_max")
	if err != nil {
		t.Fatal(err, text)
	}
	limit, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	flush := func() {
		for _, table := range []string{"conntrack", "expect"} {
			if out, err := h.client(t.Context(), "a", "conntrack", "-F", table); err != nil {
				t.Fatal(err, out)
			}
		}
	}
	open := h.begin(t, "client0", address(t, s, outside["there"], flows.UDP4), "f100000")
	machine, err := h.Host("client1")
	if err != nil {
		t.Fatal(err)
	}
	dead := address(t, s, flows.NodePort("a").Of("dead"), flows.UDP4)
	if err := machine.Do(func() error { return floodFrom(dead, limit+limit/4) }); err != nil {
		t.Fatal(err)
	}
	metrics, err := h.Agent("a").Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	expected := 0
	for line := range strings.Lines(metrics) {
		_, _ = fmt.Sscanf(line, `spillway_conntrack_expectations{helper="tftp"} %d`, &expected)
	}
	if expected < limit*9/10 || expected > limit {
		t.Errorf("%d expectations are counted after %d requests; the kernel has room for %d", expected, limit+limit/4, limit)
	}
	open.finish(t, "with a full table of expectations", "f100000", 100_000)
	flush()
	x := h.begin(t, "client0", address(t, s, outside["here"], flows.UDP4), "f5120")
	x.finish(t, "after a flood of expectations", "f5120", 5120)
}

// counted: with eBPF, a request counts once, where it is translated, and so does its
// first answer, by whatever way both go.
func (h *files) counted(t *testing.T, s *suite.File) {
	if h.Mode != "ebpf" {
		return // the kernel's helpers count nothing
	}
	read := func(node string) (asked, answered int) {
		text, err := h.Agent(node).Metrics(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(text) {
			_, _ = fmt.Sscanf(line, `spillway_ebpf_verdicts_total{verdict="helper_asked"} %d`, &asked)
			_, _ = fmt.Sscanf(line, `spillway_ebpf_verdicts_total{verdict="helper_answered"} %d`, &answered)
		}
		return asked, answered
	}
	for _, way := range []struct {
		flows.Flow
		at       string // the node that translates
		answered int
	}{
		{flows.Flow{From: "client0", To: flows.NodePort("a").Of("here")}, "a", 1},
		{flows.Flow{From: "client0", To: flows.NodePort("a").Of("there")}, "a", 1},
		{flows.Flow{From: "a2", To: flows.ClusterIP.Of("there")}, "a", 1},
		{flows.Flow{From: "a2", To: flows.ClusterIP.Of("here")}, "a", 1},
		{flows.Flow{From: "a", To: flows.ClusterIP.Of("there")}, "a", 1},
		{flows.Flow{From: "b2", To: flows.ClusterIP.Of("here")}, "b", 1},
		{flows.Flow{From: "client0", To: flows.NodePort("a").Of("dead")}, "a", 0},
	} {
		for _, combo := range flows.UDP {
			before := map[string][2]int{}
			for _, node := range h.Nodes() {
				asked, answered := read(node)
				before[node] = [2]int{asked, answered}
			}
			addr := address(t, s, way.To, combo)
			if way.answered == 0 {
				if err := send(h.socket(t, way.From), addr, request("f5120")); err != nil {
					t.Fatal(err)
				}
			} else {
				h.get(t, way.From, "tftpd-hpa", tftpClients[2], addr, 5120)
			}
			await.NoError(t, func() error {
				if asked, _ := read(way.at); asked == before[way.at][0] {
					return fmt.Errorf("%s asks %s: node %s counts no request", way.From, addr, way.at)
				}
				return nil
			})
			for _, node := range h.Nodes() {
				asked, answered := read(node)
				got, want := [2]int{asked - before[node][0], answered - before[node][1]}, [2]int{}
				if node == way.at {
					want = [2]int{1, way.answered}
				}
				if got != want {
					t.Errorf("%s asks %s (%s): node %s counts %d requests and %d answers, want %d and %d", way.From, addr, way.To, node, got[0],
						got[1], want[0], want[1])
				}
			}
		}
	}
}

// leavesNothing: with eBPF, transfers from outside leave no trace in conntrack.
func (h *files) leavesNothing(t *testing.T, s *suite.File) {
	client := h.Addr("client0", false).String()
	count := func(node string) (n int) {
		for _, table := range []string{"conntrack", "expect"} {
			out, err := h.client(t.Context(), node, "conntrack", "-L", table)
			if err != nil {
				t.Fatal(err, out)
			}
			for line := range strings.Lines(out) {
				if strings.Contains(line, "udp") && strings.Contains(line, "src="+client+" ") || strings.HasPrefix(line, "300 proto=17") {
					n++
				}
			}
		}
		return n
	}
	for _, node := range h.Nodes() {
		if out, err := h.client(t.Context(), node, "conntrack", "-F"); err != nil {
			t.Fatal(err, out)
		}
	}
	for range 50 {
		for _, to := range outside {
			x := h.begin(t, "client0", address(t, s, to, flows.UDP4), "f5120")
			x.finish(t, "counted", "f5120", 5120)
			x.conn.Close()
		}
	}
	for _, node := range h.Nodes() {
		n := count(node)
		if n > 0 && h.Mode == "ebpf" {
			t.Errorf("100 transfers have left %d entries in conntrack of node %s", n, node)
		}
		// The others live on conntrack: so much for what count can see.
		if n == 0 && h.Mode != "ebpf" && node == "a" {
			t.Error("conntrack knows no transfer")
		}
	}
}

// endpointGoes: a transfer whose server leaves the Service comes to its end, and
// the same socket is served by another for its next file.
func (h *files) endpointGoes(t *testing.T, s *suite.File) {
	var open []*transfer
	for _, combo := range flows.UDP {
		open = append(open, h.begin(t, "client0", address(t, s, outside["here"], combo), "f5120"))
	}
	s.MustWrite(t, service("here", corev1.ProtocolUDP, 69, "b0"), service("there", corev1.ProtocolUDP, 69, "b0"))
	s.MustWait(t)
	for _, x := range open {
		if h.Mode == "ebpf" {
			x.finish(t, "after the endpoint went", "f5120", 5120)
		}
		for len(x.got) > 0 { // what is under way of the old transfer
			_ = x.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			if _, _, err := x.conn.ReadFrom(make([]byte, 2048)); err != nil {
				break
			}
		}
		again, err := begin(x.conn, x.server, "f5120")
		if err != nil {
			t.Errorf("a new request by the same port: %v", err)
			continue
		}
		again.late = !x.done // the server of the old one repeats its last block
		again.finish(t, "a new request by the same port", "f5120", 5120)
		if bytes.Equal(x.got, nil) {
			t.Error("nothing had been read")
		}
	}
}

// endpointDies: a server is killed while it sends; when the Service has another, the
// same sockets are served by that, and hear nothing of the transfers that have ended.
func (h *files) endpointDies(t *testing.T, s *suite.File) {
	var open []*transfer
	for _, combo := range flows.UDP {
		open = append(open, h.begin(t, "client0", address(t, s, outside["here"], combo), "f100000"))
	}
	b0, err := h.Host("b0")
	if err != nil {
		t.Fatal(err)
	}
	pids, err := b0.Processes()
	if err != nil || len(pids) == 0 {
		t.Fatalf("servers of b0: %v, %v", pids, err)
	}
	killed := 0
	for _, pid := range pids { // the probe, which asks from there, stays
		if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); strings.HasPrefix(string(comm), "in.tftpd") {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			killed++
		}
	}
	if killed == 0 {
		t.Fatalf("none of %v is a server", pids)
	}
	for _, x := range open {
		_ = x.ack() // to a server that has ended
	}
	s.MustWrite(t, service("here", corev1.ProtocolUDP, 69, "a0"), service("there", corev1.ProtocolUDP, 69, "a0"))
	s.MustWait(t)
	for _, x := range open {
		again, err := begin(x.conn, x.server, "f5120")
		if err != nil {
			t.Errorf("a request after the server's death: %v", err)
			continue
		}
		again.finish(t, "after the server's death", "f5120", 5120)
	}
}
