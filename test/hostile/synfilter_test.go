package hostile

import (
	"flag"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestSYNFilter floods Services that have a SYN filter in the name of an honest client, whose host is
// on the LAN as the attacker is. The client connects meanwhile, also when its node does not know its
// neighbor, and the attacker gets none of its answers.
func TestSYNFilter(t *testing.T) {
	if flag.Lookup("proxy-mode").Value.String() != "ebpf" {
		return // the other dataplanes have none
	}
	for _, network := range []string{topology.Routed, topology.VXLAN} {
		t.Run(network, func(t *testing.T) {
			e := startIn(t, network, "hostile-syn-"+network, "--xdp", "generic")
			e.file = e.Load(t, filtered("here", "a0"), filtered("elsewhere", "b0"))
			for _, v := range variants {
				t.Run(v.String(), func(t *testing.T) { forgedClient(t, e, v) })
			}
		})
	}
}

// filtered is a Service whose clients must prove their address from the second SYN of a second on.
func filtered(place, endpoint string) flows.Service {
	return flows.Service{
		Name: "filtered-" + place, Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(endpoint),
		Ports:       []flows.Port{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: endpointUp}},
		Annotations: map[string]string{intent.SYNFilterAnnotation: "1"},
	}
}

func forgedClient(t *testing.T, e *env, v variant) {
	dst, client := e.nodePort(t, "filtered-"+v.place, "tcp", v), e.addr(honest, v)
	answers := e.capture(t, outsider, func(p packet) bool { return p.proto == "tcp" && p.src == dst && p.dst.Addr() == client })
	challenged := e.challenged(t)
	stop := e.floodOn(t, func(i int) packet {
		return packet{src: inTheNameOf(client, i), dst: dst, proto: "tcp", flags: "S", seq: uint32(i)}
	})
	await.True(t, "a flood whose SYNs are challenged", func() bool { return e.challenged(t)-challenged > 1000 })
	for i := range 20 {
		if i%2 == 1 {
			e.Output(t, receiver, "ip", "neighbor", "flush", "dev", "eth0", "to", client.String())
		}
		if err := e.probe(v, dst); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	stop()
	if got := answers.settled(); len(got) > 0 {
		t.Errorf("the attacker got %d answers to SYNs with the client's address, such as %+v", len(got), got[0])
	}
}

// inTheNameOf returns sources of a flood: ports of the client, and of IPv6 those of some other
// addresses of its /64 too.
func inTheNameOf(client netip.Addr, i int) netip.AddrPort {
	port := uint16(1024 + i*7%64000)
	if client.Is6() && i%2 == 1 {
		a := client.As16()
		a[14] = 0xee + byte(i/2%4)
		client = netip.AddrFrom16(a)
	}
	return netip.AddrPortFrom(client, port)
}

func (e *env) challenged(t *testing.T) float64 {
	t.Helper()
	host, err := e.Host(receiver)
	if err != nil {
		t.Fatal(err)
	}
	n, err := agent.Metric(t.Context(), host, "spillway_ebpf_verdicts_total", `verdict="syn_challenged"`)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// floodOn sends 5,000 packets a second from the outsider until stop is called.
func (e *env) floodOn(t *testing.T, next func(i int) packet) (stop func()) {
	t.Helper()
	const each = 5 // in a millisecond
	s := e.sender(t, outsider)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		pace := time.NewTicker(time.Millisecond)
		defer pace.Stop()
		for i := 0; ; i++ {
			if i%each == 0 {
				select {
				case <-done:
					return
				case <-pace.C:
				}
			}
			frame, err := s.frame(next(i))
			if err == nil {
				err = s.sendFrame(frame)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	stop = sync.OnceFunc(func() { close(done); wg.Wait() })
	t.Cleanup(stop)
	return stop
}
