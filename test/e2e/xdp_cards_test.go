package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// cardsVariable is the number of pairs of network cards that hack/vm -n has made, each with a
// cable between its two cards.
const cardsVariable = "SPILLWAY_CARDS"

// TestNativeXDP runs the XDP program in the driver of virtio_net cards, which node a gets while its
// agent runs. The cards of a pair are connected, so all packets stay in this machine:
//
//	client0 ---- LAN (bridge) ---- second card ==cable== first card: eth0 of node a
//	   \------- second card of pair 1 ==cable== first card: eth1 of node a
//
// Pair 2 has a driver that refuses XDP.
func TestNativeXDP(t *testing.T) {
	if os.Getenv(cardsVariable) == "" {
		t.Skip("needs network cards: make test-xdp runs it in a virtual machine")
	}
	if n, err := strconv.Atoi(os.Getenv(cardsVariable)); err != nil || n < 3 {
		t.Fatalf("%s is %q: see make test-xdp", cardsVariable, os.Getenv(cardsVariable))
	}
	spec := topology.DefaultSpec("e2e-xdp-cards")
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{"": {"--xdp", "auto"}}, NoAgents: true})}
	for _, node := range e.Nodes() {
		must.Do(t, e.Agent(node).Start(t.Context()))
	}
	for _, node := range e.Nodes() {
		e.waitForAgent(t, node)
	}
	// A veth has no program: see forward-by-xdp.md.
	e.wantXDP(t, "eth0", nl.XDP_ATTACHED_NONE, "veth")

	e.replaceVeth(t)
	e.wantXDP(t, "eth0", nl.XDP_ATTACHED_DRV, "mode=native")
	for _, step := range []struct {
		name string
		run  func(*env, *testing.T)
	}{
		{"forwards", (*env).xdpForwards},
		{"SYN filter", (*env).synFilter},
		{"long segments", (*env).longSegments},
		{"link down and up", (*env).linkDownAndUp},
		{"two cards", (*env).twoCards},
		{"a driver that refuses", (*env).driverRefuses},
		{"off and on", (*env).offAndOn},
	} {
		if !t.Run(step.name, func(t *testing.T) { step.run(e, t) }) {
			t.Logf("the log of node a's agent ends with:\n%s", e.Agent("a").Tail())
		}
	}
}

// netOf opens rtnetlink in a host's namespace. "lan" is the network between nodes and clients.
func (e *env) netOf(t *testing.T, host string) (netns.NsHandle, *netlink.Handle) {
	t.Helper()
	name := "spw-" + e.Spec.Name + "-" + host
	if host != "lan" {
		name = e.MustHost(t, host).Namespace
	}
	ns, err := netns.GetFromName(name)
	must.Do(t, err)
	t.Cleanup(func() { ns.Close() })
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must.Do(t, err)
	t.Cleanup(h.Close)
	return ns, h
}

// plug moves a card to a host, as a link that is up, and back when the test ends. The card gets its
// name first: agents report a device once, by the name that they see.
func (e *env) plug(t *testing.T, pair, end int, host string, attrs netlink.LinkAttrs) netlink.Link {
	t.Helper()
	own := fmt.Sprintf("card%d-%d", pair, end)
	nameCards(t)
	card, err := netlink.LinkByName(own)
	must.Do(t, err)
	must.Do(t, netlink.LinkSetName(card, attrs.Name))
	must.Do(t, netlink.LinkSetMTU(card, attrs.MTU))
	if attrs.HardwareAddr != nil {
		must.Do(t, netlink.LinkSetHardwareAddr(card, attrs.HardwareAddr))
	}
	home, err := netns.Get()
	must.Do(t, err)
	t.Cleanup(func() { home.Close() })
	ns, h := e.netOf(t, host)
	must.Do(t, netlink.LinkSetNsFd(card, int(ns)))
	card, err = h.LinkByName(attrs.Name)
	must.Do(t, err)
	t.Cleanup(func() {
		must.Do(t, h.LinkSetDown(card))
		must.Do(t, h.LinkSetName(card, own))
		must.Do(t, h.LinkSetNsFd(card, int(home)))
	})
	if attrs.MasterIndex > 0 {
		must.Do(t, h.LinkSetMasterByIndex(card, attrs.MasterIndex))
	}
	must.Do(t, h.LinkSetUp(card))
	return card
}

// nameCards gives each card of hack/vm -n a name by its permanent address.
func nameCards(t *testing.T) {
	t.Helper()
	links, err := netlink.LinkList()
	must.Do(t, err)
	for _, l := range links {
		a := l.Attrs().PermHWAddr
		if len(a) != 6 || !bytes.HasPrefix(a, []byte{2, 0, 0, 0}) || !strings.HasPrefix(l.Attrs().Name, "eth") {
			continue
		}
		must.Do(t, netlink.LinkSetDown(l))
		must.Do(t, netlink.LinkSetName(l, fmt.Sprintf("card%d-%d", a[4], a[5])))
	}
}

// addAddrs adds addresses to a link, usable at once.
func addAddrs(t *testing.T, h *netlink.Handle, l netlink.Link, addrs ...string) {
	t.Helper()
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a)
		must.Do(t, err)
		addr.Flags = unix.IFA_F_NODAD
		must.Do(t, h.AddrReplace(l, addr))
	}
}

// addressing is what a link loses with its device, or as it is set down.
type addressing struct {
	addrs  []string
	routes []netlink.Route
}

func addressingOf(t *testing.T, h *netlink.Handle, l netlink.Link) (a addressing) {
	t.Helper()
	addrs, err := h.AddrList(l, netlink.FAMILY_ALL)
	must.Do(t, err)
	for _, addr := range addrs {
		if addr.IP.IsGlobalUnicast() {
			a.addrs = append(a.addrs, addr.IPNet.String())
		}
	}
	all, err := h.RouteList(l, netlink.FAMILY_ALL)
	must.Do(t, err)
	for _, r := range all {
		if r.Gw != nil {
			a.routes = append(a.routes, r)
		}
	}
	return a
}

func (a addressing) restore(t *testing.T, h *netlink.Handle, l netlink.Link) {
	t.Helper()
	addAddrs(t, h, l, a.addrs...)
	for _, r := range a.routes {
		route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: r.Dst, Gw: r.Gw}
		must.Do(t, h.RouteReplace(route))
	}
}

// replaceVeth gives node a the first card for its veth, and the LAN the second one.
func (e *env) replaceVeth(t *testing.T) {
	_, node := e.netOf(t, "a")
	_, lan := e.netOf(t, "lan")
	veth, err := node.LinkByName("eth0")
	must.Do(t, err)
	bridge, err := lan.LinkByName("br0")
	must.Do(t, err)
	was := addressingOf(t, node, veth)
	must.Do(t, node.LinkDel(veth))
	e.plug(t, 0, 2, "lan", netlink.LinkAttrs{Name: "node0", MTU: 1500, MasterIndex: bridge.Attrs().Index})
	card := e.plug(t, 0, 1, "a", netlink.LinkAttrs{Name: "eth0", MTU: 1500, HardwareAddr: veth.Attrs().HardwareAddr})
	was.restore(t, node, card)
}

// wantXDP waits until a device of node a runs the program in a mode, and the agent's log names it
// with these words.
func (e *env) wantXDP(t *testing.T, device string, mode uint32, words string) {
	t.Helper()
	_, node := e.netOf(t, "a")
	await.NoError(t, func() error {
		l, err := node.LinkByName(device)
		must.Do(t, err)
		have := uint32(nl.XDP_ATTACHED_NONE)
		if x := l.Attrs().Xdp; x != nil {
			have = x.AttachMode
		}
		last := e.lastDecision(t, device)
		if have == mode && strings.Contains(last, words) {
			t.Logf("%s: %s", device, last)
			return nil
		}
		return fmt.Errorf("%s runs XDP in mode %d, want %d and %q in the agent's words; they are: %s\nIts log ends with:\n%s",
			device, have, mode, words, last, e.Agent("a").Tail())
	})
}

// lastDecision returns the agent's last line about XDP at a device.
func (e *env) lastDecision(t *testing.T, device string) (last string) {
	t.Helper()
	text, err := os.ReadFile(e.Agent("a").Log)
	must.Do(t, err)
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "XDP at an interface") && strings.Contains(line, "interface="+device+" ") {
			_, last, _ = strings.Cut(strings.TrimSpace(line), "msg=")
		}
	}
	return last
}

// longSegments sends 4 MiB to an endpoint and back. The sockets leave segments and checksums to the
// cards. A card with XDP gets whole, summed frames only: the host must do it.
func (e *env) longSegments(t *testing.T) {
	const port, size = 9000, 4 << 20
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: flows.On("b0"),
		Ports: []flows.Port{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: port}}})
	l, err := e.MustHost(t, "b0").Listen(t.Context(), "tcp", fmt.Sprintf(":%d", port))
	must.Do(t, err)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); c.Close() }()
		}
	}()
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	for _, combo := range flows.TCP {
		before := e.verdict(t, "translated_xdp")
		c, err := e.MustHost(t, "client0").Dial(t.Context(), "tcp", s.MustAddress(t, flows.LoadBalancer("a"), combo))
		must.Do(t, err)
		must.Do(t, c.SetDeadline(time.Now().Add(2*time.Minute)))
		go func() {
			_, _ = c.Write(data)
			_ = c.(*net.TCPConn).CloseWrite()
		}()
		sum := sha256.New()
		n, err := io.Copy(sum, c)
		c.Close()
		if err != nil || n != size || [32]byte(sum.Sum(nil)) != sha256.Sum256(data) {
			t.Errorf("%s: %d bytes of %d came back (%v)", combo, n, size, err)
		}
		t.Logf("%s: XDP sent %v packets", combo, e.verdict(t, "translated_xdp")-before)
	}
}

// linkDownAndUp sets the card down and up: the program stays.
func (e *env) linkDownAndUp(t *testing.T) {
	_, node := e.netOf(t, "a")
	card, err := node.LinkByName("eth0")
	must.Do(t, err)
	was := addressingOf(t, node, card)
	must.Do(t, node.LinkSetDown(card))
	time.Sleep(time.Second) // for the agent
	e.wantXDP(t, "eth0", nl.XDP_ATTACHED_DRV, "mode=native")
	must.Do(t, node.LinkSetUp(card))
	was.restore(t, node, card)
	e.wantXDP(t, "eth0", nl.XDP_ATTACHED_DRV, "mode=native")
	e.xdpForwards(t)
}

// twoCards gives the client a way of its own to node a, so packets leave by another card than they
// came by. The kernel tells since Linux 6.3 that a driver sends those.
func (e *env) twoCards(t *testing.T) {
	_, node := e.netOf(t, "a")
	_, client := e.netOf(t, "client0")
	near := e.plug(t, 1, 1, "a", netlink.LinkAttrs{Name: "eth1", MTU: 1500})
	far := e.plug(t, 1, 2, "client0", netlink.LinkAttrs{Name: "eth1", MTU: 9000})
	addAddrs(t, node, near, "172.31.0.1/24", "fd31::1/64")
	addAddrs(t, client, far, "172.31.0.2/24", "fd31::2/64")
	e.wantXDP(t, "eth1", nl.XDP_ATTACHED_DRV, "mode=native")
	version, err := kernel.RunningVersion()
	must.Do(t, err)
	buffers := !version.Less(kernel.Version{Major: 6, Minor: 3}) // virtio_net has frames of several
	e.longFrames(t, near, buffers)

	lan, err := client.LinkByName("eth0")
	must.Do(t, err)
	was := addressingOf(t, client, lan)
	for _, r := range was.routes {
		gw, v6 := net.ParseIP("172.31.0.1"), r.Gw.To4() == nil
		if v6 {
			gw = net.ParseIP("fd31::1")
		}
		if r.Gw.String() != e.Addr("a", v6).String() {
			continue
		}
		must.Do(t, client.RouteDel(&r))
		must.Do(t, client.RouteReplace(&netlink.Route{LinkIndex: far.Attrs().Index, Dst: r.Dst, Gw: gw}))
	}
	defer func() { // the cards leave, and their routes with them
		must.Do(t, client.LinkSetDown(far))
		was.restore(t, client, lan)
	}()
	if buffers {
		e.xdpForwards(t)
	} else if _, sent := e.xdpStreams(t); sent > 0 {
		t.Errorf("XDP sent %v packets by another device, and nothing tells that the driver does", sent)
	}
}

// longFrames raises the MTU above a page. virtio_net does not refuse that. If it cannot give the
// program such frames, it drops them, and cannot remove the program (6.1): the log has to tell.
func (e *env) longFrames(t *testing.T, card netlink.Link, buffers bool) {
	_, node := e.netOf(t, "a")
	must.Do(t, node.LinkSetMTU(card, 9000))
	if !buffers {
		e.wantXDP(t, "eth1", nl.XDP_ATTACHED_DRV, "raised from 1500 to 9000")
		must.Do(t, node.LinkSetMTU(card, 1500))
		e.wantXDP(t, "eth1", nl.XDP_ATTACHED_DRV, "mode=native")
		return
	}
	time.Sleep(time.Second) // the program is attached again
	e.wantXDP(t, "eth1", nl.XDP_ATTACHED_DRV, "mode=native")
	resp, err := e.MustProbe(t, "client0").Do(t.Context(), probe.Request{Op: probe.Try, Proto: "udp",
		Dst: "172.31.0.1:8080", Size: 8000, Tries: 3, TimeoutMS: patienceMS})
	must.Do(t, err)
	for _, a := range resp.Answers {
		if a.Err != "" {
			t.Errorf("a datagram of 8000 bytes: %+v", a)
		}
	}
}

// driverRefuses plugs a card whose driver cannot switch off what its host does to frames. The log
// has the driver's own words.
func (e *env) driverRefuses(t *testing.T) {
	_, node := e.netOf(t, "a")
	card := e.plug(t, 2, 1, "a", netlink.LinkAttrs{Name: "eth2", MTU: 1500})
	addAddrs(t, node, card, "172.29.0.1/24")
	e.wantXDP(t, "eth2", nl.XDP_ATTACHED_NONE, "GRO_HW")
}

// offAndOn restarts the agent without XDP and with it, while connections last. The card resets its
// queues as the program leaves and comes back, and may lose packets then: TCP repeats them.
func (e *env) offAndOn(t *testing.T) {
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: flows.On("b0", "b1")})
	client := e.MustProbe(t, "client0")
	var streams []stream
	for _, combo := range flows.TCP {
		streams = append(streams, stream{"over " + string(combo), client})
		_, err := client.Do(t.Context(), probe.Request{Op: probe.Stream, Name: "over " + string(combo), Proto: "tcp",
			Dst: s.MustAddress(t, flows.LoadBalancer("a"), combo), PauseMS: 200, TimeoutMS: patienceMS})
		must.Do(t, err)
	}
	e.restartWithXDP(t, "off")
	e.wantXDP(t, "eth0", nl.XDP_ATTACHED_NONE, "")
	before := e.verdict(t, "translated_xdp")
	askMore(t, streams, 5)
	if by := e.verdict(t, "translated_xdp") - before; by > 0 {
		t.Errorf("XDP sent %v packets, and is off", by)
	}
	e.restartWithXDP(t, "auto")
	e.wantXDP(t, "eth0", nl.XDP_ATTACHED_DRV, "")
	for _, combo := range flows.TCP {
		resp, err := client.Do(t.Context(), probe.Request{Op: probe.Stop, Name: "over " + string(combo)})
		must.Do(t, err)
		if r := resp.Report; r.Ended > 0 || r.Sent != r.Answered {
			t.Errorf("%s: %+v", combo, r)
		}
	}
	must.Do(t, e.Agent("a").Signal(syscall.SIGTERM))
	must.Do(t, e.Agent("a").Cleanup(t.Context()))
	e.wantXDP(t, "eth0", nl.XDP_ATTACHED_NONE, "")
}

func (e *env) restartWithXDP(t *testing.T, xdp string) {
	t.Helper()
	e.Flags["a"] = []string{"--xdp", xdp} // the last one counts
	must.Do(t, e.Agent("a").Signal(syscall.SIGTERM))
	must.Do(t, e.Agent("a").Start(t.Context()))
	e.waitForAgent(t, "a")
}

// waitForAgent waits long: an emulated machine with traffic takes minutes to load the programs.
func (e *env) waitForAgent(t *testing.T, node string) {
	t.Helper()
	err := e.Agent(node).WaitReady(t.Context())
	for range 2 {
		if err != nil {
			err = e.Agent(node).WaitReady(t.Context())
		}
	}
	must.Do(t, err)
}
