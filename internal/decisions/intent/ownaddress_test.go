package intent

import (
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// servedAt returns the addresses at which Service web is served, sorted as text; a NodePort has none.
func servedAt(tr *Tracker) (out []string) {
	for _, p := range tr.State().Ports {
		for _, f := range p.Frontends {
			if text := f.Addr.String(); p.ID.Service == name("web") && !slices.Contains(out, text) {
				out = append(out, text)
			}
		}
	}
	slices.Sort(out)
	return out
}

// A process of the node that listens at its own address gets what is sent there (kube-proxy with the
// rules of NodeLocal DNSCache: KEP-1024).
func TestAClusterIPOfTheNodesDeviceIsLeftToIt(t *testing.T) {
	dns := web(clusterIPs("10.96.0.10", "fd00::10"), nodePort(30053), externalIPs("192.0.2.7"), ports(
		model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53, NodePort: 30053},
		model.ServicePort{Name: "tcp", Protocol: model.TCP, Port: 53, NodePort: 30053}))
	rest := []string{"192.0.2.7", "invalid IP"}
	all := []string{"10.96.0.10", "192.0.2.7", "fd00::10", "invalid IP"}
	tr := newTracker(dns, &model.Node{Name: here, Addresses: addrs("192.168.0.1", "10.96.0.10")}, sliceOf("s", at("10.1.0.1", here)))
	for _, step := range []struct {
		name     string
		addrs    []string
		want     []string
		problems int
	}{
		{"a Node object that claims the address", []string{"192.168.0.1"}, all, 0},
		{"a device has it", []string{"192.168.0.1", "10.96.0.10"}, []string{"192.0.2.7", "fd00::10", "invalid IP"}, 1},
		{"and the other family's", []string{"fd00::10", "192.168.0.1", "10.96.0.10"}, rest, 2},
		{"and the others' too, which are served", []string{"fd00::10", "192.168.0.1", "10.96.0.10", "192.0.2.7"}, rest, 2},
		{"the device is deleted", []string{"192.168.0.1"}, all, 0},
	} {
		tr.SetNodeAddrs(addrs(step.addrs...))
		tr.Changes()
		if got := servedAt(tr); !slices.Equal(got, step.want) {
			t.Errorf("%s: served at %v, want %v", step.name, got, step.want)
		}
		var problems []string
		for _, p := range tr.Problems() {
			if strings.Contains(p.What, LocalRedirectAnnotation) {
				problems = append(problems, p.String())
			}
		}
		if len(problems) != step.problems || len(problems) > 0 &&
			!strings.Contains(problems[0], "spec.clusterIPs[0]: 10.96.0.10 is an address of a device of this node") {
			t.Errorf("%s: problems %q, want %d", step.name, problems, step.problems)
		}
	}
}
