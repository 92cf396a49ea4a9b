package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// hostPort is the port of the node that leads to the cache's.
const hostPort = 18211

// portmap is what the CNI's plugin of that name writes: what is for an address of the
// node and that port goes to the pod.
const portmap = `
table inet cni_hostport {
	chain hostports {
		meta nfproto ipv4 meta l4proto { tcp, udp } th dport HOST dnat ip to V4:PORT
		meta nfproto ipv6 meta l4proto { tcp, udp } th dport HOST dnat ip6 to [V6]:PORT
	}
	chain prerouting {
		type nat hook prerouting priority -100; policy accept;
		fib daddr type local jump hostports
	}
	chain output {
		type nat hook output priority -100; policy accept;
		fib daddr type local jump hostports
	}
}`

// testHostPort sends requests to a pod through a hostPort: netfilter translates them on
// each dataplane, and a deny rule of the pod applies on this path, too.
func (e *env) testHostPort(t *testing.T) {
	roles := policyPods{"a0": "cache", "b0": "client", "b1": "other"}
	a0 := "{nodeName: " + e.NodeName("a0")
	e.writeAll(t, "pods.yaml", strings.Replace(e.podsYAML(roles), a0,
		a0+fmt.Sprintf(", containers: [{name: c, ports: [{containerPort: %d, hostPort: %d}, {protocol: UDP, containerPort: %[1]d, hostPort: "+
			"%[2]d}]}]", cachePort, hostPort), 1))
	defer e.writePods(t, roles)
	run(t, e.MustHost(t, "a"), "nft", strings.NewReplacer("HOST", fmt.Sprint(hostPort), "PORT", fmt.Sprint(cachePort),
		"V4", e.Addr("a0", false).String(), "V6", e.Addr("a0", true).String()).Replace(portmap))
	defer run(t, e.MustHost(t, "a"), "nft", "delete table inet cni_hostport")
	heard := e.startEcho(t, "a0", cachePort)
	policy := func(deny string) string {
		return strings.Replace(policyYAML("host", deny, clientPods), "ports: [", fmt.Sprintf("ports: [{protocol: UDP, port: %d}, ", cachePort), 1)
	}
	for _, deny := range []string{"", "  deny: others\n"} {
		e.writeAll(t, "policy.yaml", policy(deny))
		for _, c := range []struct {
			from, network string
			v6            bool
			peer          bool
		}{
			{"b0", "tcp", false, true}, {"b0", "tcp", true, true}, {"b0", "udp", false, true}, {"b0", "udp", true, true},
			{"b1", "tcp", false, false}, {"client0", "tcp", true, false}, {"client0", "udp", false, false}, {"b1", "udp", true, false},
		} {
			e.forgetEntries(t)
			answers, before := c.peer || deny == "", heard.Load()
			err := e.askEither(t, c.from, c.network, netip.AddrPortFrom(e.Addr("a", c.v6), hostPort), answers)
			if (err == nil) != answers {
				t.Errorf("%q: %s asks by the hostPort, %s (IPv6 %v): %v, want an answer %v", deny, c.from, c.network, c.v6, err, answers)
			}
			if heard.Load() > before && !answers { // that answers are denied too is not enough
				t.Errorf("%s asks by the hostPort, %s (IPv6 %v), and the pod hears of it", c.from, c.network, c.v6)
			}
		}
	}
	e.expectMetric(t, "a", `spillway_do_not_track_packets_total{policy="host",verdict="denied"}`)
	e.expectMetric(t, "a", `spillway_do_not_track_refused{reason="HostPortNeedsNAT"}`)
}

// startEcho has a host send back what comes to a UDP port, and counts that.
func (e *env) startEcho(t *testing.T, short string, port int) (heard *atomic.Int64) {
	t.Helper()
	var c net.PacketConn
	err := e.MustHost(t, short).Do(func() (err error) {
		c, err = net.ListenPacket("udp", fmt.Sprint(":", port))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	heard = &atomic.Int64{}
	go func() {
		b := make([]byte, 64)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			heard.Add(1)
			_, _ = c.WriteTo(b[:n], from)
		}
	}()
	return heard
}

// askEither asks memcached, or the echo, and waits long for an answer if it is to come.
func (e *env) askEither(t *testing.T, from, network string, to netip.AddrPort, answers bool) (err error) {
	t.Helper()
	patience := 300 * time.Millisecond
	if answers {
		patience = 3 * time.Second
	}
	var conn net.Conn
	err = e.MustHost(t, from).Do(func() error {
		conn, err = net.DialTimeout(network, to.String(), patience)
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	if network == "tcp" {
		return askCache(conn)
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := conn.Write([]byte("x")); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 8))
	return err
}
