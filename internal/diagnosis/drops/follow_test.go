package drops

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// connect sends a SYN and does not wait for long.
func connect(to string) {
	c, err := net.DialTimeout("tcp", to, 50*time.Millisecond)
	if err == nil {
		c.Close()
	}
}

func sendUDP(to string) {
	if c, err := net.Dial("udp", to); err == nil {
		_, _ = c.Write([]byte("lost"))
		c.Close()
	}
}

// Each fault is planted for real, and the packet that it costs is found with the
// kernel's reason and the hop.
func TestALostPacketIsFound(t *testing.T) {
	for _, row := range []struct {
		name, script string
		send         func(t *testing.T)
		port         uint16
		reasons      []string // any of them, as kernels differ
		by, hook     string
		table, chain string // if netfilter's functions can be traced
		meaning      string
	}{
		{name: "an nft rule", port: 81,
			script: `nft "add table inet filter; add chain inet filter in { type filter hook input priority 0; }; add chain inet filter sub; add rule inet filter in jump sub; add rule inet filter sub tcp dport 81 drop"`,
			send:   func(*testing.T) { connect("127.0.0.1:81") }, reasons: []string{"NETFILTER_DROP"},
			by: "nft", hook: "INPUT", table: "filter", chain: "in", meaning: "rule"},
		{name: "an nft rule for IPv6", port: 81,
			script: `nft "add table inet filter; add chain inet filter out { type filter hook output priority 0; }; add rule inet filter out tcp dport 81 drop"`,
			send:   func(*testing.T) { connect("[::1]:81") }, reasons: []string{"NETFILTER_DROP"},
			by: "nft", hook: "OUTPUT", table: "filter", chain: "out", meaning: "rule"},
		{name: "an INVALID packet", port: 9,
			script: `nft "add table inet filter; add chain inet filter in { type filter hook input priority 0; }; add rule inet filter in ct state invalid drop"`,
			send:   sendNothing, reasons: []string{"NETFILTER_DROP"}, by: "nft", hook: "INPUT", table: "filter", chain: "in", meaning: "INVALID"},
		{name: "no TCP socket", port: 83, send: func(*testing.T) { connect("127.0.0.1:83") }, reasons: []string{"NO_SOCKET"},
			meaning: "nothing listens"},
		{name: "no UDP socket", port: 84, send: func(*testing.T) { sendUDP("127.0.0.1:84") }, reasons: []string{"NO_SOCKET"},
			meaning: "nothing listens"},
	} {
		t.Run(row.name, func(t *testing.T) {
			n := newNamespace(t, "lost", row.script)
			f := follow(t, Config{Namespaces: []conntrack.Namespace{n}})
			netnstest.Within(t, n.Names[0], func() { row.send(t) })
			d := next(t, f, func(d Drop) bool { return d.DestinationPort == row.port && slices.Contains(row.reasons, d.Reason) })
			if d.Namespace != n.Names[0] || d.By != row.by || d.Hook != row.hook || !strings.Contains(d.Meaning, row.meaning) || d.Location == "" {
				t.Errorf("%+v", d)
			}
			if f.traced() && (d.Table != row.table || d.Chain != row.chain) {
				t.Errorf("table %q, chain %q, want %q, %q", d.Table, d.Chain, row.table, row.chain)
			}
		})
	}
}

func TestUnwantedPacketsAreSkipped(t *testing.T) {
	n := newNamespace(t, "unwanted", "")
	f := follow(t, Config{Namespaces: []conntrack.Namespace{n}})
	netnstest.Within(t, n.Names[0], func() {
		sendUDP("127.0.0.1:84")
		sendUDP("127.0.0.1:85")
	})
	f.places.known, f.places.looked = nil, time.Time{} // it would look at once
	f.places.list = func() ([]conntrack.Namespace, error) {
		t.Error("looked for the place of an unwanted packet")
		return nil, nil
	}
	var seen []uint16
	_, err := f.NextOf(t.Context(), func(p *Packet) bool {
		seen = append(seen, p.DestinationPort)
		if p.DestinationPort == 85 {
			f.places = newPlaces(conntrack.Namespaces)
		}
		return p.DestinationPort == 85
	})
	if err != nil || !slices.Equal(seen, []uint16{84, 85}) {
		t.Errorf("saw packets to ports %d, %v; want 84, 85", seen, err)
	}
}

// sendNothing sends a TCP header with no flags at all, which no connection has.
func sendNothing(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	segment := make([]byte, 20)
	segment[1], segment[3], segment[12] = 9, 9, 5<<4
	_ = unix.Sendto(fd, segment, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
}

func TestALostPacketOfLegacyIptablesIsFound(t *testing.T) {
	if _, err := exec.LookPath("iptables-legacy"); err != nil {
		t.Skip("needs iptables-legacy")
	}
	n := newNamespace(t, "legacy", "iptables-legacy -A OUTPUT -p tcp --dport 82 -j DROP")
	f := follow(t, Config{Namespaces: []conntrack.Namespace{n}})
	netnstest.Within(t, n.Names[0], func() { connect("127.0.0.1:82") })
	d := next(t, f, func(d Drop) bool { return d.DestinationPort == 82 })
	if d.Reason != "NETFILTER_DROP" || d.Hook != "OUTPUT" || d.TCPFlags != "S" || !strings.Contains(d.Meaning, "iptables") {
		t.Errorf("%+v", d)
	}
	if f.traced() && (d.By != "iptables" || d.Table != "filter") {
		t.Errorf("by %q, table %q", d.By, d.Table)
	}
}

// Two namespaces and a veth: packets that a router refuses.
func TestALostPacketBetweenNamespacesIsFound(t *testing.T) {
	router := newNamespace(t, "router", "")
	client := newNamespace(t, "client", "")
	// A pod's address is looked for in all namespaces of the machine: no other run has these.
	link := uint32(100<<24|64<<16) + uint32(os.Getpid()&0xfffff)<<2 // 100.64.0.0/10, RFC 6598
	gateway := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, link+1)))
	pod := gateway.Next()
	shell(t, strings.NewReplacer("R", router.Names[0], "C", client.Names[0], "GATEWAY", gateway.String(), "POD", pod.String()).Replace(`
ip -n C link add eth0 type veth peer name in0 netns R
ip -n C addr add POD/30 dev eth0; ip -n C addr add 192.0.2.9/32 dev lo; ip -n C link set eth0 up; ip -n C route add default via GATEWAY
ip -n R addr add GATEWAY/30 dev in0; ip -n R link set in0 up
ip -n R link add other type veth peer name rehto; ip -n R link set rehto up; ip -n R link set other up; ip -n R route add 192.0.2.0/24 dev other
ip netns exec R sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.in0.rp_filter=1
ip netns exec C sysctl -qw net.ipv4.conf.eth0.arp_announce=2`))
	for _, row := range []struct {
		name, from, to string
		reasons        []string
		meaning        string
	}{
		{"reverse path", "192.0.2.9:0", gateway.String() + ":85", []string{"IP_RPFILTER"}, "rp_filter"},
		{"TTL", pod.String() + ":0", "192.0.2.77:90", []string{"IP_INHDR"}, "TTL (hop limit) ran out"},
		{"no route", pod.String() + ":0", "203.0.113.1:86", []string{"IP_INNOROUTES", "IP_OUTNOROUTES", "NOT_SPECIFIED"}, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := follow(t, Config{Namespaces: []conntrack.Namespace{router}})
			netnstest.Within(t, client.Names[0], func() {
				c, err := net.ListenPacket("udp4", row.from)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if row.name == "TTL" {
					raw, _ := c.(*net.UDPConn).SyscallConn()
					_ = raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, 1) })
				}
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.WriteTo([]byte("lost"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(row.to))); err != nil {
					t.Fatal(err)
				}
			})
			to := netip.MustParseAddrPort(row.to)
			d := next(t, f, func(d Drop) bool {
				return d.DestinationPort == to.Port() && d.Destination == to.Addr() && slices.Contains(row.reasons, d.Reason)
			})
			if d.Namespace != router.Names[0] || d.Interface != "in0" || !strings.Contains(d.Meaning, row.meaning) {
				t.Errorf("%+v", d)
			}
		})
	}
	t.Run("a pod by its address", func(t *testing.T) {
		list, _ := conntrack.Namespaces()
		found, err := FindPod(pod.String(), list)
		if err != nil || len(found.Namespaces) != 1 || found.Namespaces[0].Inode != client.Inode {
			t.Fatalf("%+v, %v", found, err)
		}
		f := follow(t, Config{Pods: []Pod{found}})
		netnstest.Within(t, client.Names[0], func() { sendUDP("203.0.113.1:87") }) // lost in the router, from the pod
		next(t, f, func(d Drop) bool { return d.DestinationPort == 87 && d.Inode == router.Inode })
		netnstest.Within(t, client.Names[0], func() { sendUDP("127.0.0.1:88") }) // lost in the pod
		next(t, f, func(d Drop) bool { return d.DestinationPort == 88 && d.Inode == client.Inode })
	})
}

// The kernel frees such a SYN as if it had been delivered.
func TestASYNToAFullListenerIsFound(t *testing.T) {
	n := newNamespace(t, "listener", "")
	f := follow(t, Config{Namespaces: []conntrack.Namespace{n}})
	netnstest.Within(t, n.Names[0], func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 89, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			t.Fatal(err)
		}
		if err := unix.Listen(fd, 0); err != nil {
			t.Fatal(err)
		}
		// The server does not accept: the queue is full after the last ACK of one
		// connection.
		var taken []uint16
		for {
			c, err := net.DialTimeout("tcp", "127.0.0.1:89", 300*time.Millisecond)
			if err != nil {
				break
			}
			defer c.Close()
			if taken = append(taken, c.LocalAddr().(*net.TCPAddr).AddrPort().Port()); len(taken) > 20 {
				t.Fatal("the queue does not fill")
			}
		}
		d := next(t, f, func(d Drop) bool { return d.DestinationPort == 89 })
		if d.Reason != "TCP_LISTEN_OVERFLOW" || d.By != "tcp" || d.Namespace != n.Names[0] || d.Interface != "lo" ||
			!strings.Contains(d.Meaning, "backlog") {
			t.Errorf("%+v", d)
		}
		if slices.Contains(taken, d.SourcePort) {
			t.Errorf("a SYN that was taken is told: %+v", d)
		}
	})
}

// Two sockets with one port and two addresses send to one destination at once, through a
// rule that masquerades. Both get that port, and one loses when its entry is inserted.
// The rules in between make the race likely within a few rounds.
func TestAPacketThatConntrackDropsIsFound(t *testing.T) {
	n := newNamespace(t, "insert", `
ip link add d0 type veth peer name d1; ip link set d1 up; ip link set d0 up; ip addr add 192.0.2.1/24 dev d0
ip neigh add 192.0.2.254 lladdr 02:00:00:00:00:01 dev d0; ip route add default via 192.0.2.254
ip addr add 10.9.0.1/32 dev lo; ip addr add 10.9.0.2/32 dev lo
{ echo "table ip nat { chain post { type nat hook postrouting priority 100; ip saddr 10.9.0.0/24 masquerade; }; }
table ip slow { chain slow { type filter hook postrouting priority 200; }; }"
i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo "add rule ip slow slow udp sport 1 udp length $i"; done; } | nft -f -`)
	f := follow(t, Config{Namespaces: []conntrack.Namespace{n}})
	done := make(chan struct{})
	var sender sync.WaitGroup
	t.Cleanup(sender.Wait)
	t.Cleanup(func() { close(done) })
	sender.Go(func() {
		netnstest.Within(t, n.Names[0], func() {
			for round := 0; round < 60_000; round++ {
				select {
				case <-done:
					return
				default:
					atOnce(t, 1024+round)
				}
			}
		})
	})
	d := next(t, f, func(d Drop) bool { return d.By == "conntrack" })
	if d.Reason != "NETFILTER_DROP" || d.Hook != "POSTROUTING" || d.DestinationPort != 53 || !strings.Contains(d.Meaning, "insert_failed") {
		t.Errorf("%+v", d)
	}
}

func atOnce(t *testing.T, port int) {
	var both sync.WaitGroup
	start := make(chan struct{})
	for a := range byte(2) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{10, 9, 0, 1 + a}}); err != nil {
			t.Error(err)
		}
		both.Go(func() {
			defer unix.Close(fd)
			<-start
			_ = unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 53, Addr: [4]byte{198, 51, 100, 1}})
		})
	}
	close(start)
	both.Wait()
}

// Drops that the filters exclude are counted, but not reported.
func TestFiltersAreTheKernels(t *testing.T) {
	n := newNamespace(t, "filter", "ip addr add 10.78.0.1/32 dev lo")
	other := newNamespace(t, "other", "ip addr add 10.78.0.1/32 dev lo")
	here := []conntrack.Namespace{n}
	for _, row := range []struct {
		name string
		c    Config
	}{
		{"port", Config{Namespaces: here, Ports: []uint16{4000, 90}}},
		{"address", Config{Namespaces: here, Addresses: []netip.Prefix{netip.MustParsePrefix("10.78.0.0/23")}}},
		{"IPv6 address", Config{Namespaces: here, Addresses: []netip.Prefix{netip.MustParsePrefix("::1/128")}}},
		{"protocol", Config{Namespaces: here, Protocol: unix.IPPROTO_TCP}},
		{"reason", Config{Namespaces: here, Reasons: []string{"skb_drop_reason_no_socket"}, Ports: []uint16{90}}},
		{"not that reason", Config{Namespaces: here, Reasons: []string{"!OTHERHOST"}, Ports: []uint16{90}}},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := follow(t, row.c)
			netnstest.Within(t, other.Names[0], func() { connect("10.78.0.1:90") }) // in another namespace
			netnstest.Within(t, n.Names[0], func() { sendUDP("127.0.0.1:91") })     // fits no row
			netnstest.Within(t, n.Names[0], func() {
				if row.name == "IPv6 address" {
					connect("[::1]:90")
				} else {
					connect("10.78.0.1:90")
				}
			})
			d := next(t, f, func(Drop) bool { return true })
			if d.DestinationPort != 90 || d.Inode != n.Inode {
				t.Errorf("%+v", d)
			}
			counts, err := f.Counts()
			if err != nil || counts.Seen <= counts.Matched || counts.Matched == 0 {
				t.Errorf("%+v, %v", counts, err)
			}
		})
	}
}

func TestWhatIsBeyondTheRateIsCounted(t *testing.T) {
	n := newNamespace(t, "rate", "")
	f := follow(t, Config{Namespaces: []conntrack.Namespace{n}, Ports: []uint16{92}, Rate: 3})
	const sent = 200
	netnstest.Within(t, n.Names[0], func() {
		for range sent {
			sendUDP("127.0.0.1:92")
		}
	})
	next(t, f, func(Drop) bool { return true })
	counts, err := f.Counts()
	if err != nil || counts.Matched != sent || counts.Limited == 0 || counts.Limited > sent-3 {
		t.Errorf("%+v, %v", counts, err)
	}
}

// Without a reader the buffer fills, and lost events are counted.
func TestWhatTheBufferCannotHoldIsCounted(t *testing.T) {
	n := newNamespace(t, "lost", "")
	f := follow(t, Config{Namespaces: []conntrack.Namespace{n}, Ports: []uint16{93}})
	netnstest.Within(t, n.Names[0], func() {
		c, err := net.ListenPacket("udp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:93"))
		for range 8000 {
			_, _ = c.WriteTo([]byte("lost"), to)
		}
	})
	counts, err := f.Counts()
	if err != nil || counts.Lost == 0 || counts.Limited != 0 || counts.Lost >= counts.Matched {
		t.Errorf("%+v, %v", counts, err)
	}
}

// A pod is known by the host name of its processes.
func TestAPodIsFoundByItsName(t *testing.T) {
	n := newNamespace(t, "pod", "")
	name := "spw-drops-pod-" + strconv.Itoa(unix.Getpid())
	stop := inPod(t, n, name)
	defer stop()
	list, _ := conntrack.Namespaces()
	pod, err := FindPod(name, list)
	if err != nil || len(pod.Namespaces) != 1 || pod.Namespaces[0].Inode != n.Inode {
		t.Fatalf("%+v, %v", pod, err)
	}
	f := follow(t, Config{Pods: []Pod{pod}})
	netnstest.Within(t, n.Names[0], func() { sendUDP("127.0.0.1:94") })
	if d := next(t, f, func(d Drop) bool { return d.DestinationPort == 94 }); d.Pod != name {
		t.Errorf("pod %q", d.Pod)
	}
	if _, err := FindPod("no-such-pod", list); err == nil {
		t.Error("a pod that is not there is found")
	}
}
