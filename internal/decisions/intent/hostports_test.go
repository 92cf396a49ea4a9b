package intent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// withHostPorts is a Pod of this node whose container's port is 1000 higher.
func withHostPorts(n string, ports ...model.HostPort) *model.Pod {
	p := podObject(n, here, nil, "10.1.0.5", "fd00:1::5")
	for _, h := range ports {
		h.Port = h.Host + 1000
		p.HostPorts = append(p.HostPorts, h)
	}
	return p
}

// served lists the frontends and endpoints of all ports, one line for each.
func served(tr *Tracker) (out []string) {
	for _, p := range tr.State().Ports {
		for _, f := range p.Frontends {
			at := "node"
			if f.Addr.IsValid() {
				at = f.Addr.String()
			}
			line := fmt.Sprintf("%s %s:%d %s/%s", p.ID, at, f.Port, routeNames[f.ExternalRoute], routeNames[f.InternalRoute])
			for _, e := range p.Endpoints {
				line += " " + e.Addr.String()
				if e.MustTraverseNetfilter {
					line += " netfilter"
				}
			}
			out = append(out, line)
		}
	}
	return out
}

func wantServed(t *testing.T, what string, tr *Tracker, want ...string) {
	t.Helper()
	if got := served(tr); !slices.Equal(got, want) {
		t.Errorf("%s: served\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func wantProblem(t *testing.T, what string, tr *Tracker, parts ...string) {
	t.Helper()
	problems := tr.Problems()
	if len(problems) != len(parts) {
		t.Errorf("%s: problems %v, want %d", what, problems, len(parts))
		return
	}
	for i, part := range parts {
		if !strings.Contains(problems[i].String(), part) {
			t.Errorf("%s: problem %q, want %q", what, problems[i], part)
		}
	}
}

func newHostPortTracker() *Tracker {
	tr := New(Config{NodeName: here, HostPorts: true})
	tr.SetNodeAddrs(addrs("192.168.0.1", "fd00:2::1"))
	tr.Apply(whole(delta(&model.Node{Name: here, Addresses: addrs("192.168.0.1", "fd00:2::1")})))
	return tr
}

func TestHostPorts(t *testing.T) {
	tr := newHostPortTracker()
	tr.Apply(delta(withHostPorts("dns", model.HostPort{Protocol: model.UDP, Host: 53},
		model.HostPort{Protocol: model.TCP, Host: 80, IP: netip.MustParseAddr("192.168.0.1")})))
	both := []string{
		"ns/pod/dns:53/UDP/IPv4 node:53 local/cluster 10.1.0.5:1053",
		"ns/pod/dns:53/UDP/IPv6 node:53 local/cluster [fd00:1::5]:1053",
		"ns/pod/dns:80/TCP/IPv4 192.168.0.1:80 local/cluster 10.1.0.5:1080",
	}
	wantServed(t, "a Pod", tr, both...)
	wantProblem(t, "a Pod", tr)
	for i := range both {
		both[i] += " netfilter"
	}
	tr.Apply(delta(&model.NetworkPolicy{Name: name("all"), Ingress: true}))
	wantServed(t, "a NetworkPolicy selects it", tr, both...)
	tr.Apply(model.Delta{Pods: map[model.Name]*model.Pod{name("dns"): nil}})
	wantServed(t, "the Pod has gone", tr)

	starting := withHostPorts("web", model.HostPort{Protocol: model.TCP, Host: 80})
	starting.IPs = nil
	elsewhere := withHostPorts("far", model.HostPort{Protocol: model.TCP, Host: 81})
	elsewhere.Node = there
	tr.Apply(delta(starting, elsewhere))
	wantServed(t, "Pods that start, or run elsewhere", tr)

	off := New(Config{NodeName: here})
	off.Apply(whole(delta(withHostPorts("web", model.HostPort{Protocol: model.TCP, Host: 80}))))
	wantServed(t, "without the flag", off)
}

// TestHostPortsAreNotOnLoopback serves NodePorts on loopback, where a Service is reached and a
// Pod is not: programs of the node talk to each other there (127.0.0.1:10257).
func TestHostPortsAreNotOnLoopback(t *testing.T) {
	const host = 10257
	pod := withHostPorts("web", model.HostPort{Protocol: model.TCP, Host: host})
	both := []string{
		"ns/pod/web:10257/TCP/IPv4 192.168.0.1:10257 local/cluster 10.1.0.5:11257",
		"ns/pod/web:10257/TCP/IPv6 fd00:2::1:10257 local/cluster [fd00:1::5]:11257",
	}
	tr := New(Config{NodeName: here, HostPorts: true, LocalhostNodePorts: true})
	tr.SetNodeAddrs(addrs("192.168.0.1", "fd00:2::1"))
	tr.Apply(whole(delta(&model.Node{Name: here, Addresses: addrs("192.168.0.1", "fd00:2::1")}, pod)))
	wantServed(t, "at each address", tr, both...)

	tr.SetNodeAddrs(addrs("192.168.0.1", "fd00:2::1", "192.168.0.9"))
	tr.Changes()
	third := "ns/pod/web:10257/TCP/IPv4 192.168.0.9:10257 local/cluster 10.1.0.5:11257"
	wantServed(t, "with another address", tr, both[0], third, both[1])
	svc := web(clusterIPs("10.96.0.1"), externalIPs("192.168.0.9"), portNumber(host))
	tr.Apply(delta(svc))
	wantServed(t, "a Service has the port of an address", tr, both[0], both[1],
		"ns/web:10257/TCP/IPv4 10.96.0.1:10257 reject/reject", "ns/web:10257/TCP/IPv4 192.168.0.9:10257 reject/reject")
	tr.Apply(withoutService("web"))
	wantServed(t, "the Service has gone", tr, both[0], third, both[1])

	elsewhere := New(Config{NodeName: here, HostPorts: true, LocalhostNodePorts: true,
		NodePortAddresses: prefixes("192.168.0.0/24", "::1/128")})
	elsewhere.SetNodeAddrs(addrs("192.168.0.1", "10.0.0.1", "fd00:2::1"))
	elsewhere.Apply(whole(delta(pod)))
	wantServed(t, "loopback of one family", elsewhere, "ns/pod/web:10257/TCP/IPv4 node:10257 local/cluster 10.1.0.5:11257")

	primary := New(Config{NodeName: here, HostPorts: true, LocalhostNodePorts: true, NodePortPrimary: true})
	primary.Apply(whole(delta(&model.Node{Name: here, Addresses: addrs("192.168.0.1")}, pod)))
	wantServed(t, "at primary addresses", primary, "ns/pod/web:10257/TCP/IPv4 node:10257 local/cluster 10.1.0.5:11257",
		"ns/pod/web:10257/TCP/IPv6 node:10257 local/cluster [fd00:1::5]:11257")
}

func TestHostPortConflicts(t *testing.T) {
	tr := newHostPortTracker()
	pod := withHostPorts("web", model.HostPort{Protocol: model.TCP, Host: 30080})
	pod.IPs = pod.IPs[:1]
	tr.Apply(delta(pod))
	alone := "ns/pod/web:30080/TCP/IPv4 node:30080 local/cluster 10.1.0.5:31080"
	wantServed(t, "alone", tr, alone)
	other := withHostPorts("web-2", model.HostPort{Protocol: model.TCP, Host: 30080})
	other.IPs = addrs("10.1.0.6")
	tr.Apply(delta(other))
	wantServed(t, "another Pod wants the port", tr, alone)
	wantProblem(t, "another Pod wants the port", tr,
		"Pod ns/web-2: hostPort 30080/TCP: NodePort 30080/TCP (IPv4) is already taken by the hostPort of Pod ns/web")
	tr.Apply(model.Delta{Pods: map[model.Name]*model.Pod{other.Name: nil}})

	svc := web()
	svc.Type, svc.Ports[0].NodePort = model.NodePort, 30080
	tr.Apply(delta(svc, sliceOf("s", at("10.2.0.1", there))))
	wantServed(t, "a Service wants the port", tr, "ns/web:80/TCP/IPv4 10.96.0.1:80 cluster/cluster 10.2.0.1:8080",
		"ns/web:80/TCP/IPv4 node:30080 cluster/cluster 10.2.0.1:8080")
	wantProblem(t, "a Service wants the port", tr,
		"Pod ns/web: hostPort 30080/TCP: NodePort 30080/TCP (IPv4) is already taken by Service ns/web")
	tr.Apply(model.Delta{Services: map[model.Name]*model.Service{svc.Name: nil}})
	wantServed(t, "the Service has gone", tr, alone)
	wantProblem(t, "the Service has gone", tr)
}

func TestHostPortsThatAreNotServed(t *testing.T) {
	for _, c := range []struct {
		port    model.HostPort
		served  bool
		problem string
	}{
		{model.HostPort{Protocol: model.TCP, Host: 10250}, false, "is the port of the kubelet at a node's address, and is not served"},
		{model.HostPort{Protocol: model.UDP, Host: 8472}, false, "is the port of VXLAN at a node's address, and is not served"},
		{model.HostPort{Protocol: model.TCP, Host: 22}, true, "is the port of SSH at a node's address"},
		{model.HostPort{Protocol: model.TCP, Host: 80, IP: netip.MustParseAddr("192.0.2.9")}, false,
			"hostIP 192.0.2.9 is not an address of this node, and is not served"},
		{model.HostPort{Protocol: model.TCP, Host: 80, IP: netip.MustParseAddr("127.0.0.1")}, false,
			"hostIP 127.0.0.1 is not an address of this node"},
		{model.HostPort{Protocol: model.TCP, Host: 80, IP: netip.MustParseAddr("0.0.0.0")}, true, ""},
	} {
		tr := newHostPortTracker()
		pod := withHostPorts("web", c.port)
		pod.IPs = pod.IPs[:1]
		tr.Apply(delta(pod))
		what := fmt.Sprintf("%v at %v", c.port.Host, c.port.IP)
		if n := len(served(tr)); n > 0 != c.served {
			t.Errorf("%s: %d addresses are served", what, n)
		}
		if c.problem == "" {
			wantProblem(t, what, tr)
		} else {
			wantProblem(t, what, tr, c.problem)
		}
	}
	tr := newHostPortTracker()
	twice := withHostPorts("web", model.HostPort{Protocol: model.TCP, Host: 80}, model.HostPort{Protocol: model.TCP, Host: 80})
	tr.Apply(delta(twice))
	wantProblem(t, "twice", tr, "Pod ns/web: hostPort 80/TCP: repeats an earlier port")
	each := newHostPortTracker()
	byFamily := withHostPorts("web", model.HostPort{Protocol: model.TCP, Host: 80, IP: netip.MustParseAddr("192.168.0.1")},
		model.HostPort{Protocol: model.TCP, Host: 80, IP: netip.MustParseAddr("fd00:2::1")})
	byFamily.HostPorts[1].Port = 9090
	each.Apply(delta(byFamily))
	wantServed(t, "another container for each family", each, "ns/pod/web:80/TCP/IPv4 192.168.0.1:80 local/cluster 10.1.0.5:1080",
		"ns/pod/web:80/TCP/IPv6 fd00:2::1:80 local/cluster [fd00:1::5]:9090")
	long := newHostPortTracker()
	long.Apply(delta(withHostPorts(strings.Repeat("a", 64), model.HostPort{Protocol: model.TCP, Host: 80})))
	wantServed(t, "a long name", long)
	wantProblem(t, "a long name", long, "metadata.name: has more than 63 characters, and its host ports are not served")
	gone := newHostPortTracker()
	gone.Apply(delta(withHostPorts("web", model.HostPort{Protocol: model.TCP, Host: 80, IP: netip.MustParseAddr("192.168.0.1")})))
	gone.SetNodeAddrs(addrs("192.168.0.1", "192.168.0.2"))
	gone.Apply(delta(&model.Node{Name: here}))
	gone.SetNodeAddrs(addrs("192.168.0.2"))
	gone.Changes()
	wantServed(t, "the node loses the address", gone)
}

// TestAHostIPTakesNoNodePort of a Service: the Service has the port at all of the node's addresses.
func TestAHostIPTakesNoNodePort(t *testing.T) {
	tr := newHostPortTracker()
	at := netip.MustParseAddr("192.168.0.1")
	tr.Apply(delta(withHostPorts("p", model.HostPort{Protocol: model.TCP, Host: 30080, IP: at},
		model.HostPort{Protocol: model.TCP, Host: 32000, IP: at})))
	pod := []string{"ns/pod/p:30080/TCP/IPv4 192.168.0.1:30080 local/cluster 10.1.0.5:31080",
		"ns/pod/p:32000/TCP/IPv4 192.168.0.1:32000 local/cluster 10.1.0.5:33000"}
	wantServed(t, "without a Service", tr, pod...)

	s := web()
	s.Type, s.Ports[0].NodePort = model.NodePort, 30080
	tr.Apply(delta(s))
	wantServed(t, "with a NodePort", tr, pod[1], "ns/web:80/TCP/IPv4 10.96.0.1:80 reject/reject",
		"ns/web:80/TCP/IPv4 node:30080 reject/reject")
	wantProblem(t, "with a NodePort", tr, "192.168.0.1:30080/TCP is already taken by Service ns/web")

	s = web()
	s.Type, s.ExternalLocal, s.HealthCheckNodePort = model.LoadBalancer, true, 32000
	tr.Apply(delta(s))
	wantServed(t, "with a healthCheckNodePort", tr, pod[0], "ns/web:80/TCP/IPv4 10.96.0.1:80 reject/reject")

	tr.Apply(withoutService("web"))
	wantServed(t, "without the Service", tr, pod...)
}

// TestAHostPortTakesNoHealthCheckNodePort of a Service, at all of the node's addresses.
func TestAHostPortTakesNoHealthCheckNodePort(t *testing.T) {
	tr := newHostPortTracker()
	p := withHostPorts("p", model.HostPort{Protocol: model.TCP, Host: 32000}, model.HostPort{Protocol: model.UDP, Host: 32001})
	p.IPs = p.IPs[:1]
	tr.Apply(delta(p))
	pod := []string{"ns/pod/p:32000/TCP/IPv4 node:32000 local/cluster 10.1.0.5:33000",
		"ns/pod/p:32001/UDP/IPv4 node:32001 local/cluster 10.1.0.5:33001"}
	wantServed(t, "without a Service", tr, pod...)
	for _, port := range []uint16{32000, 32001} {
		s := web()
		s.Type, s.ExternalLocal, s.HealthCheckNodePort = model.LoadBalancer, true, port
		tr.Apply(delta(s))
		left := pod
		if port == 32000 {
			left = pod[1:]
			wantProblem(t, "with a healthCheckNodePort", tr,
				"Pod ns/p: hostPort 32000/TCP: NodePort 32000/TCP (IPv4) is already taken by Service ns/web")
		}
		wantServed(t, fmt.Sprint("with healthCheckNodePort ", port), tr,
			append(slices.Clone(left), "ns/web:80/TCP/IPv4 10.96.0.1:80 reject/reject")...)
		tr.Apply(withoutService("web"))
		wantServed(t, "without the Service", tr, pod...)
	}
}
