package intent

import (
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// taker is a Service with one port, to which rows add an address.
func taker(number uint16, more ...func(*model.Service)) *model.Service {
	return web(append([]func(*model.Service){called("taker"), clusterIPs("10.96.0.9", "fd00::9"), portNumber(number)}, more...)...)
}

func TestPortsOfNodesAreNotServedAtTheirAddresses(t *testing.T) {
	nodes := []any{
		&model.Node{Name: here, Addresses: addrs("192.168.0.1", "fd00:1::1")},
		&model.Node{Name: there, Addresses: addrs("192.168.0.2")},
	}
	apiServers := sliceOf("kubernetes", at("192.168.0.2", there), at("192.0.2.9", ""))
	apiServers.Service = apiServerService
	apiServers.Ports = []model.EndpointPort{{Name: "https", Protocol: model.TCP, Port: 6443}}
	for _, row := range []struct {
		name    string
		service *model.Service
		served  bool
		problem string // field and words, "" for none
	}{
		{"the kubelet", taker(10250, externalIPs("192.168.0.1")), false,
			"spec.externalIPs[0]: 192.168.0.1:10250/TCP is the port of the kubelet at a node's address, and is not served; change the port, or " +
				"remove the address"},
		{"by a LoadBalancer IP", taker(10250, loadBalancer("192.168.0.1")), false,
			"status.loadBalancer.ingress: 192.168.0.1:10250/TCP is the port of the kubelet"},
		{"of another node", taker(10250, externalIPs("192.168.0.2")), false, "192.168.0.2:10250/TCP is the port of the kubelet"},
		{"at an IPv6 address", taker(10250, externalIPs("fd00:1::1")), false, "[fd00:1::1]:10250/TCP is the port of the kubelet"},
		{"etcd's clients", taker(2379, externalIPs("192.168.0.1")), false, "the port of etcd"},
		{"etcd's peers", taker(2380, externalIPs("192.168.0.1")), false, "the port of etcd"},
		{"VXLAN", taker(8472, udp, externalIPs("192.168.0.1")), false, "192.168.0.1:8472/UDP is the port of VXLAN"},
		{"VXLAN by its registered port", taker(4789, udp, externalIPs("192.168.0.1")), false, "the port of VXLAN"},
		{"WireGuard", taker(51820, udp, externalIPs("192.168.0.1")), false, "the port of WireGuard"},
		{"the API server", taker(6443, externalIPs("192.168.0.2")), false,
			"192.168.0.2:6443/TCP is the port of the API server at a node's address"},
		{"the API server, by a LoadBalancer IP", taker(6443, loadBalancer("192.168.0.2")), false, "the port of the API server"},
		{"the agent's health checks", taker(10256, externalIPs("192.168.0.2")), false, "192.168.0.2:10256/TCP is the port of this agent"},
		{"the agent's metrics at one address", taker(9100, externalIPs("192.168.0.1")), false, "192.168.0.1:9100/TCP is the port of this agent"},
		{"SSH is served and reported", taker(22, externalIPs("192.168.0.1")), true,
			"192.168.0.1:22/TCP is the port of SSH at a node's address, where it hides the node's SSH server; change the port, unless you want " +
				"that"},

		{"no API server is at this node", taker(6443, loadBalancer("192.168.0.1")), true, ""},
		{"an API server that is no node", taker(6443, loadBalancer("192.0.2.9")), true, "hides an endpoint of Service default/kubernetes"},
		{"metrics on loopback", taker(10249, externalIPs("192.168.0.1")), true, ""},
		{"metrics at another address", taker(9100, externalIPs("192.168.0.2")), true, ""},
		{"another protocol", taker(10250, udp, externalIPs("192.168.0.1")), true, ""},
		{"another protocol of the agent's port", taker(10256, udp, externalIPs("192.168.0.1")), true, ""},
		{"another port", taker(443, externalIPs("192.168.0.1")), true, ""},
		{"an address that is no node's", taker(10250, externalIPs("192.0.2.1")), true, ""},
		{"an address of this node's kernel that its Node lacks", taker(10250, loadBalancer("192.168.0.100")), true, ""},
		{"a clusterIP", taker(10250), true, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			tr := New(Config{NodeName: here, Servers: []netip.AddrPort{
				netip.MustParseAddrPort("0.0.0.0:10256"), netip.MustParseAddrPort("127.0.0.1:10249"), netip.MustParseAddrPort("192.168.0.1:9100"),
			}})
			tr.SetNodeAddrs(addrs("192.168.0.1", "192.168.0.100"))
			tr.Apply(delta(append(nodes, row.service, apiServers)...))
			served := describe(tr.State().Ports)
			if got := strings.Contains(served, "IP 192.") || strings.Contains(served, "IP fd00:1:") || row.name == "a clusterIP"; got != row.served {
				t.Errorf("served: %v, want %v:\n%s", got, row.served, served)
			}
			if !strings.Contains(served, "ClusterIP 10.96.0.9:") {
				t.Errorf("the clusterIP is not served:\n%s", served)
			}
			switch got := tr.Problems(); {
			case row.problem == "" && len(got) > 0:
				t.Errorf("problems %v, want none", got)
			case row.problem != "" && (len(got) != 1 || !strings.Contains(got[0].String(), row.problem)):
				t.Errorf("problems %v, want one with %q", got, row.problem)
			}
		})
	}
}
