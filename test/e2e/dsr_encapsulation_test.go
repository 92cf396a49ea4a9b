package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestDSREncapsulations changes what the network between the nodes forwards, under clients of a Service
// with DSR. The nodes must find another way each time, and no connection may end.
func TestDSREncapsulations(t *testing.T) {
	t.Parallel()
	for _, network := range []string{topology.Routed, topology.VXLAN} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			spec := topology.DefaultSpec("e2e-encap-" + network)
			spec.Nodes, spec.PodNetwork, spec.Masquerade = 2, network, true // also the agents' probes
			startDirect(t, spec, "dsr").encapsulations(t)
		})
	}
}

// between are rules for the bridge between the nodes, by the length of the headers before the pods'
// packets, in bits. A rule has the headers of IP at ip, and counts from the transport header of VXLAN
// or from the network header.
func (e *env) between(t *testing.T, rules ...string) {
	t.Helper()
	text := "table bridge between\ndelete table bridge between\ntable bridge between {\n chain forward {\n  type filter hook forward " +
		"priority 0;\n"
	for _, r := range rules {
		text += "  " + r + "\n"
	}
	e.OnLAN(t, text+" }\n}\n", "nft", "-f", "-")
}

// noOptions drops pods' packets with IP options, and IPv6 packets with options for the destination.
func (e *env) noOptions() []string {
	if e.Spec.PodNetwork == topology.Routed {
		return []string{"ether type ip ip hdrlength > 5 drop", "ether type ip6 ip6 nexthdr 60 drop"}
	}
	return []string{ // after the headers of UDP, VXLAN and Ethernet
		"udp dport 8472 @th,224,16 0x0800 @th,244,4 > 5 drop",
		"udp dport 8472 @th,224,16 0x86dd @th,288,8 60 drop",
	}
}

// noLong drops datagrams between the nodes of more than so many bytes, with all headers, and says
// nothing.
func (e *env) noLong(length int) []string {
	if e.Spec.PodNetwork == topology.Routed {
		return []string{fmt.Sprintf("udp dport 6080 ether type ip ip length > %d drop", length),
			fmt.Sprintf("udp dport 6080 ether type ip6 ip6 length > %d drop", length-40)}
	}
	return []string{
		fmt.Sprintf("udp dport 8472 @th,224,16 0x0800 @th,256,16 > %d drop", length),
		fmt.Sprintf("udp dport 8472 @th,224,16 0x86dd @th,272,16 > %d drop", length-40),
	}
}

// noDatagrams drops those between the nodes.
func (e *env) noDatagrams() []string {
	if e.Spec.PodNetwork == topology.Routed {
		return []string{"udp dport 6080 drop"}
	}
	return []string{"udp dport 8472 @th,224,16 0x0800 @th,416,16 6080 drop", "udp dport 8472 @th,224,16 0x86dd @th,576,16 6080 drop"}
}

func (e *env) encapsulations(t *testing.T) {
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: flows.On("b0", "b1"),
		Annotations: map[string]string{intent.BalanceAnnotation: "maglev"}})
	client := e.MustProbe(t, "client0")
	e.awaitEncapsulation(t, dataplane.EncapsulationOption)
	e.askBy(t, s, 10000, 12_000, true)
	streams := e.startDSRStreams(t, s, client)

	e.between(t, e.noOptions()...)
	e.awaitEncapsulation(t, dataplane.EncapsulationGUE)
	e.askBy(t, s, 11000, 0, true)
	e.askBy(t, s, 12000, 12_000, true)
	r := e.trace(t, "client0", s.MustAddress(t, flows.LoadBalancer("a"), flows.TCP4))
	if nat := step(r, "source NAT"); !strings.Contains(nat.Follows, "within datagrams") {
		t.Errorf("trace: %+v", r)
	}
	if text := e.doctor(t, "a"); !strings.Contains(text, "dsr-encapsulated") {
		t.Errorf("doctor: %s", text)
	}

	measured := func() int {
		log, err := os.ReadFile(e.Agent("a").Log)
		must.Do(t, err)
		return strings.Count(string(log), "encapsulation=gue mtu=")
	}
	before := measured()
	e.between(t, append(e.noOptions(), e.noLong(1390)...)...)
	// The programs of the endpoints' node answer probes without its agent.
	must.Do(t, e.Agent("b").Signal(syscall.SIGKILL))
	await.True(t, "the new length of datagrams for each endpoint", func() bool { return measured() >= before+4 })
	e.awaitEncapsulation(t, dataplane.EncapsulationGUE)
	must.Do(t, e.Agent("b").Start(t.Context()))
	must.Do(t, e.Agent("b").WaitReady(t.Context()))
	e.askBy(t, s, 13000, 12_000, true)

	e.between(t, append(e.noOptions(), e.noDatagrams()...)...)
	e.awaitEncapsulation(t, dataplane.EncapsulationNone)
	e.askBy(t, s, 14000, 0, false)
	e.askBy(t, s, 15000, 12_000, false)
	if text := e.doctor(t, "a"); !strings.Contains(text, "dsr-impossible") {
		t.Errorf("doctor: %s", text)
	}

	e.between(t)
	e.awaitEncapsulation(t, dataplane.EncapsulationOption)
	e.askBy(t, s, 16000, 12_000, true)
	e.oneDirection(t, s)
	for _, name := range streams {
		resp, err := client.Do(t.Context(), probe.Request{Op: probe.Stop, Name: name})
		must.Do(t, err)
		if r := resp.Report; r.Ended > 0 || r.Sent != r.Answered || r.Sent < 100 {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// oneDirection has the network drop what the endpoints' node sends to clients. No probe can see that.
// Clients must be served by node a all the same.
func (e *env) oneDirection(t *testing.T, s *suite.File) {
	client, own := e.MustProbe(t, "client0"), e.MustHost(t, "client0")
	combos := []flows.Combo{flows.TCP4, flows.TCP6}
	var rules []string
	for i, combo := range combos {
		dst, err := netip.ParseAddrPort(s.MustAddress(t, flows.LoadBalancer("a"), combo))
		must.Do(t, err)
		rules = append(rules, fmt.Sprintf("iifname %q %s saddr %s tcp sport %d tcp flags & syn == syn drop", e.MustHost(t, "b").Name,
			[]string{"ip", "ip6"}[i], dst.Addr(), dst.Port()))
	}
	e.between(t, rules...)
	for _, combo := range combos {
		for i := range 3 {
			resp, err := client.Do(t.Context(), probe.Request{Op: probe.Try, Proto: "tcp", Dst: s.MustAddress(t, flows.LoadBalancer("a"), combo),
				LocalPort: 17000 + i, TimeoutMS: 5000})
			must.Do(t, err)
			a := resp.Answers[0]
			seen, err := netip.ParseAddrPort(a.Source)
			if err != nil || seen.Addr().Unmap() == own.IPv4 || seen.Addr() == own.IPv6 {
				t.Errorf("%s: %+v", combo, a)
			}
		}
	}
	e.between(t)
}

// awaitEncapsulation waits until node a uses this way to all endpoints.
func (e *env) awaitEncapsulation(t *testing.T, encapsulation string) {
	t.Helper()
	want := fmt.Sprintf(`spillway_ebpf_dsr_endpoints{encapsulation="%s"} 4`, encapsulation) // two pods of two families
	await.NoError(t, func() error {
		page, err := e.Agent("a").Metrics(t.Context())
		if err == nil && !strings.Contains(page, want) {
			err = fmt.Errorf("no %s, but %q", want, regexp.MustCompile(`dsr_endpoints\{.*`).FindAllString(page, -1))
		}
		return err
	})
	var status struct {
		DSREndpoints []struct {
			Encapsulation string
			Count         int
		}
	}
	must.Do(t, json.Unmarshal([]byte(e.spillway(t, "a", "status", "-o", "json")), &status))
	if list := status.DSREndpoints; len(list) != 1 || list[0].Encapsulation != encapsulation || list[0].Count != 4 {
		t.Errorf("status shows direct endpoints %v, want 4 by %s", list, encapsulation)
	}
}

// askBy asks by all protocols, from local ports from this one on, questions of this length. The
// endpoints must see the client, or else node a.
func (e *env) askBy(t *testing.T, s *suite.File, port, size int, kept bool) {
	t.Helper()
	client, own := e.MustProbe(t, "client0"), e.MustHost(t, "client0")
	for _, combo := range flows.AllCombos {
		if size > 0 && combo.Protocol() == "udp" {
			continue
		}
		for i := range 10 {
			resp, err := client.Do(t.Context(), probe.Request{Op: probe.Try, Proto: combo.Protocol(),
				Dst: s.MustAddress(t, flows.LoadBalancer("a"), combo), LocalPort: port + i, Size: size, TimeoutMS: 5000})
			must.Do(t, err)
			a := resp.Answers[0]
			seen, err := netip.ParseAddrPort(a.Source)
			if err != nil || (seen.Addr().Unmap() == own.IPv4 || seen.Addr() == own.IPv6) != kept {
				t.Fatalf("%s, %d bytes, client's address kept %v: answer %+v", combo, size, kept, a)
			}
		}
	}
}

func (e *env) startDSRStreams(t *testing.T, s *suite.File, client *probe.Process) (names []string) {
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6} {
		for i := range 5 {
			name := fmt.Sprintf("%s %d", combo, i)
			_, err := client.Do(t.Context(), probe.Request{Op: probe.Stream, Name: name, Proto: combo.Protocol(),
				Dst: s.MustAddress(t, flows.LoadBalancer("a"), combo), PauseMS: 100, TimeoutMS: 30000})
			must.Do(t, err)
			names = append(names, name)
		}
	}
	return names
}
