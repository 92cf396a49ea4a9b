package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// BenchmarkSync measures a cold full sync, a new or deleted endpoint, and a full sync
// without differences. It also measures the minimum of any change: iptables-restore with
// one rule in an existing chain.
//
//	go test ./internal/dataplane/iptables -run XXX -bench Sync -benchtime 10x
func BenchmarkSync(b *testing.B) {
	for _, v := range variants {
		for _, services := range []int{10, 1000, 5000} {
			name := fmt.Sprintf("%s/services=%d", v, services)
			b.Run(name+"/cold", func(b *testing.B) { benchCold(b, v, services) })
			b.Run(name+"/endpoint", func(b *testing.B) { benchEndpoint(b, v, services) })
			b.Run(name+"/floor", func(b *testing.B) { benchFloor(b, v, services) })
			b.Run(name+"/unchanged", func(b *testing.B) { benchUnchanged(b, v, services) })
		}
	}
}

func benchCold(b *testing.B, v Variant, services int) {
	s := manyServices(services, 10)
	for range b.N {
		b.StopTimer()
		n := newBench(b)
		n.use(v)
		be := n.open()
		b.StartTimer()
		if err := be.Replace(context.Background(), s); err != nil {
			b.Fatal(err)
		}
	}
}

func benchEndpoint(b *testing.B, v Variant, services int) {
	n := newBench(b)
	n.use(v)
	be, s := n.open(), manyServices(services, 10)
	if err := be.Replace(context.Background(), s); err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		p := *s.Ports[i/2%len(s.Ports)]
		if i%2 == 0 {
			p.Endpoints = p.Endpoints[1:]
		}
		if err := be.Apply(context.Background(), intent.Changes{Upserts: []*intent.ServicePort{&p}}); err != nil {
			b.Fatal(err)
		}
		i++
	}
}

func benchFloor(b *testing.B, v Variant, services int) {
	n := newBench(b)
	n.use(v)
	if err := n.open().Replace(context.Background(), manyServices(services, 10)); err != nil {
		b.Fatal(err)
	}
	n.must("*nat\n:THEIRS - [0:0]\nCOMMIT\n")
	for b.Loop() {
		n.must("*nat\n:THEIRS - [0:0]\n-A THEIRS -j ACCEPT\nCOMMIT\n")
	}
}

func benchUnchanged(b *testing.B, v Variant, services int) {
	n := newBench(b)
	n.use(v)
	be, s := n.open(), manyServices(services, 10)
	if err := be.Replace(context.Background(), s); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := be.Applied(context.Background()); err != nil {
			b.Fatal(err)
		}
		if err := be.Replace(context.Background(), s); err != nil {
			b.Fatal(err)
		}
	}
}

// manyServices are Services of one IPv4 port with endpoints on other nodes.
func manyServices(n, endpoints int) intent.State {
	s := intent.State{Node: testNode()}
	for i := range n {
		p := &intent.ServicePort{
			ID: id(fmt.Sprintf("svc-%d", i), "http", 80, model.TCP, model.IPv4),
			Frontends: []intent.Frontend{{
				Kind: intent.ClusterIP, Addr: netip.AddrFrom4([4]byte{10, byte(96 + i>>16), byte(i >> 8), byte(i)}), Port: 80,
				ExternalRoute: intent.ToCluster, InternalRoute: intent.ToCluster,
			}},
		}
		for e := range endpoints {
			at := i*endpoints + e
			p.Endpoints = append(p.Endpoints, intent.Endpoint{
				Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(128 + at>>16), byte(at >> 8), byte(at)}), 8080), ClusterPolicy: true,
			})
		}
		s.Ports = append(s.Ports, p)
	}
	sortPorts(s.Ports)
	return s
}
