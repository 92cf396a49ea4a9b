package netnstest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
)

// Outside is a node with two pods, and a machine outside of the cluster that serves on port 8080.
// The machine routes to the pods by the node, so that it answers a pod's own address, too.
//
//	pod1 10.244.0.2, fd44::2 -- veth1 ┐
//	pod2 10.244.0.3, fd44::3 -- veth2 ├ node 172.30.0.10, fd30::a
//	server 172.30.0.99, fd30::99 -- lan0 ┘
type Outside struct {
	t  testing.TB
	ns map[string]netns.NsHandle
}

// OutsideAddrs are one family's addresses in an Outside.
type OutsideAddrs struct {
	Node, Gateway string // the node, towards the server and towards pods
	Pod1, Pod2    string
	Pods          string // the range of both, and of Gateway
	Server, Other string // two addresses of the server
}

// The addresses in an Outside, and both families.
var (
	OutsideIPv4 = OutsideAddrs{"172.30.0.10", "10.244.0.1", "10.244.0.2", "10.244.0.3", "10.244.0.0/24", "172.30.0.99", "198.51.100.9"}
	OutsideIPv6 = OutsideAddrs{"fd30::a", "fd44::1", "fd44::2", "fd44::3", "fd44::/64", "fd30::99", "2001:db8::9"}

	OutsideFamilies = []OutsideAddrs{OutsideIPv4, OutsideIPv6}
)

// NewOutside makes the thread's network namespace the node. Enter has made the namespace.
func NewOutside(t testing.TB) *Outside {
	t.Helper()
	o := &Outside{t: t, ns: map[string]netns.NsHandle{}}
	for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+file, []byte("1"), 0); err != nil { // of the thread's namespace
			t.Fatal(err)
		}
	}
	o.ip("link set lo up")
	four, six := &OutsideIPv4, &OutsideIPv6
	o.add("pod1", "veth1", four.Gateway, four.Pod1, six.Gateway, six.Pod1)
	o.add("pod2", "veth2", four.Gateway, four.Pod2, six.Gateway, six.Pod2)
	o.add("server", "lan0", four.Node, four.Server, six.Node, six.Server)
	for _, a := range OutsideFamilies {
		o.ip("route add " + a.Other + " via " + a.Server + " dev lan0 onlink")
		o.in("server", func() {
			o.ip("addr add " + a.Other + " dev lo nodad")
			o.serve(a.Server)
			o.serve(a.Other)
		})
		o.serve(a.Node)
	}
	return o
}

// add makes a machine behind a device of the node. addrs are pairs: the node's address, and the
// machine's.
func (o *Outside) add(name, device string, addrs ...string) {
	o.t.Helper()
	home, err := netns.Get()
	if err != nil {
		o.t.Fatal(err)
	}
	defer home.Close()
	machine, err := netns.New()
	if err == nil {
		err = netns.Set(home)
	}
	if err != nil {
		o.t.Fatal(err)
	}
	o.ns[name] = machine
	o.t.Cleanup(func() { machine.Close() })
	o.ip(fmt.Sprintf("link add %s type veth peer name eth0 netns /proc/%d/fd/%d", device, os.Getpid(), machine))
	// The kernel's link-local addresses would be tentative at first, and delay packets by seconds.
	up := func(device, addr string) {
		o.ip("link set "+device+" addrgenmode none", "link set "+device+" up", "addr add "+addr+"/64 dev "+device+" nodad")
	}
	up(device, "fe80::1")
	o.in(name, func() {
		o.ip("link set lo up")
		up("eth0", "fe80::2")
	})
	for ; len(addrs) > 0; addrs = addrs[2:] {
		here, there := addrs[0], addrs[1]
		o.ip("addr add "+here+" dev "+device+" nodad", "route add "+there+" dev "+device)
		o.in(name, func() {
			o.ip("addr add "+there+" dev eth0 nodad", "route add "+here+" dev eth0")
			version := "-4"
			if strings.Contains(here, ":") {
				version = "-6"
			}
			o.ip(version + " route add default via " + here + " dev eth0")
		})
	}
}

// Own gives the node two more addresses of the family, and returns them.
func (o *Outside) Own(a OutsideAddrs) (more [2]string) {
	o.t.Helper()
	more[0] = netip.MustParseAddr(a.Node).Next().String()
	more[1] = netip.MustParseAddr(more[0]).Next().String()
	for _, addr := range more {
		o.ip("addr add " + addr + " dev lan0 nodad")
	}
	return more
}

// ip runs commands of ip in the thread's namespace.
func (o *Outside) ip(commands ...string) {
	o.t.Helper()
	for _, c := range commands {
		if out, err := exec.CommandContext(context.Background(), "ip", strings.Fields(c)...).CombinedOutput(); err != nil {
			o.t.Fatalf("ip %s: %v\n%s", c, err, out)
		}
	}
}

// in runs f in the namespace of a machine; "node" is the thread's own.
func (o *Outside) in(name string, f func()) {
	o.t.Helper()
	if name == "node" {
		f()
		return
	}
	in(o.t, o.ns[name], f)
}

// serve answers on port 8080 of an address with the client's address and port.
func (o *Outside) serve(addr string) {
	o.t.Helper()
	at := net.JoinHostPort(addr, "8080")
	datagrams, err := net.ListenPacket("udp", at)
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { datagrams.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := datagrams.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = datagrams.WriteTo([]byte(from.String()), from)
		}
	}()
	connections, err := net.Listen("tcp", at)
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { connections.Close() })
	go func() {
		for {
			c, err := connections.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, c.RemoteAddr())
			c.Close()
		}
	}()
}

// patience bounds the time of a question.
const patience = 5 * time.Second

// Ask connects a machine (node, pod1, pod2), with its address from, to port 8080 of another
// address. It returns the client that the server sees, and the client's own address and port.
func (o *Outside) Ask(network, machine, from, to string) (seen, own netip.AddrPort) {
	o.t.Helper()
	o.in(machine, func() {
		d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		if network == "udp" {
			d.LocalAddr = &net.UDPAddr{IP: net.ParseIP(from)}
		}
		c, err := d.DialContext(context.Background(), network, net.JoinHostPort(to, "8080"))
		if err != nil {
			o.t.Errorf("%s from %s to %s: %v", network, from, to, err)
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if network == "udp" {
			_, _ = c.Write([]byte("which client?"))
		}
		buf := make([]byte, 100)
		n, err := c.Read(buf)
		if err != nil {
			o.t.Errorf("%s from %s to %s: %v", network, from, to, err)
			return
		}
		seen, own = netip.MustParseAddrPort(string(buf[:n])), netip.MustParseAddrPort(c.LocalAddr().String())
	})
	return seen, own
}

// Sees fails unless the server at address to sees client want for a machine's address from.
func (o *Outside) Sees(network, machine, from, to, want string) {
	o.t.Helper()
	if seen, _ := o.Ask(network, machine, from, to); seen.IsValid() && seen.Addr().String() != want {
		o.t.Errorf("%s: %s sees %s for %s of %s, want %s", network, to, seen, from, machine, want)
	}
}

// PortsKept counts the connections of pod1 to the server, of eight, that keep their source port. One
// of 65,536 keeps it by chance.
func (o *Outside) PortsKept(network string, a OutsideAddrs) (kept int) {
	o.t.Helper()
	for range 8 {
		if seen, own := o.Ask(network, "pod1", a.Pod1, a.Server); seen.Port() == own.Port() {
			kept++
		}
	}
	return kept
}

// SeesPodsAs fails unless each pod has one of two addresses of the node outside, pod1 the first, and random ports.
func (o *Outside) SeesPodsAs(a OutsideAddrs, own [2]string) {
	o.t.Helper()
	for _, network := range []string{"tcp", "udp"} {
		for range 3 {
			o.Sees(network, "pod1", a.Pod1, a.Server, own[0])
			o.Sees(network, "pod2", a.Pod2, a.Other, own[1])
		}
		if kept := o.PortsKept(network, a); kept > 1 {
			o.t.Errorf("%s to %s: %d of 8 connections kept their port", network, a.Server, kept)
		}
	}
}

// AskTFTP has the server ask pod1 for a file on port 69, as another node does that has translated
// a client's request to pod1. It returns the address from which pod1's answer arrives. The answer
// begins a connection from a new port.
func (o *Outside) AskTFTP(a OutsideAddrs) (answered netip.Addr) {
	o.t.Helper()
	listen := func(machine, addr, port string) (c net.PacketConn) {
		o.t.Helper()
		o.in(machine, func() {
			var err error
			if c, err = net.ListenPacket("udp", net.JoinHostPort(addr, port)); err != nil {
				o.t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(patience))
		})
		return c
	}
	client, server := listen("server", a.Server, "0"), listen("pod1", a.Pod1, "69")
	defer client.Close()
	defer server.Close()
	if _, err := client.WriteTo([]byte("\x00\x01file\x00octet\x00"), server.LocalAddr()); err != nil {
		o.t.Fatal(err)
	}
	buf := make([]byte, 100)
	_, from, err := server.ReadFrom(buf)
	if err != nil {
		o.t.Fatalf("pod1 gets no request: %v", err)
	}
	answer := listen("pod1", a.Pod1, "0")
	defer answer.Close()
	if _, err := answer.WriteTo([]byte("\x00\x03\x00\x01data"), from); err != nil {
		o.t.Fatal(err)
	}
	if _, from, err = client.ReadFrom(buf); err != nil {
		o.t.Fatalf("the client gets no answer: %v", err)
	}
	return netip.MustParseAddrPort(from.String()).Addr()
}
