package topology

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

func TestPlan(t *testing.T) {
	s := DefaultSpec("x")
	s.Nodes, s.PodsPerNode = 3, 2
	c := newCluster(s, "/cg/spillway-lab/x")
	pod := c.Pod(2, 1)
	for what, got := range map[string][2]string{
		"pod name":       {pod.Name, "node2-pod1"},
		"pod namespace":  {pod.Namespace, "spw-x-node2-pod1"},
		"pod IPv4":       {pod.IPv4.String(), "10.244.2.3"},
		"pod IPv6":       {pod.IPv6.String(), "fd44:0:0:2::3"},
		"pod cgroup":     {pod.Cgroup, "/cg/spillway-lab/x/node2/pod1"},
		"pod device":     {pod.NodeDevice, "veth1"},
		"node IPv4":      {c.Node(2).IPv4.String(), "172.30.0.12"},
		"node IPv6":      {c.Node(2).IPv6.String(), "fd30::c"},
		"node cgroup":    {c.Node(2).Cgroup, "/cg/spillway-lab/x/node2/host"},
		"node's subtree": {c.Node(2).CgroupRoot, "/cg/spillway-lab/x/node2"},
		"client IPv4":    {c.Client(0).IPv4.String(), "172.30.0.200"},
	} {
		if got[0] != got[1] {
			t.Errorf("%s: got %s, want %s", what, got[0], got[1])
		}
	}
}

func TestPlanHasNoAddressTwice(t *testing.T) {
	s := DefaultSpec("x")
	s.Nodes, s.PodsPerNode, s.Clients = maxNodes, maxPods, maxClients
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	seen := map[netip.Addr]string{}
	for _, h := range newCluster(s, "/cg").Hosts() {
		for _, a := range h.Addrs() {
			if other := seen[a]; other != "" {
				t.Fatalf("%s and %s both have %s", other, h.Name, a)
			}
			seen[a] = h.Name
		}
	}
}

func TestSingleStackPlan(t *testing.T) {
	s := Spec{Name: "x", Nodes: 1, PodsPerNode: 1, IPv6: true}.withDefaults()
	h := newCluster(s, "/cg").Pod(0, 0)
	if h.IPv4.IsValid() || !h.IPv6.IsValid() || len(h.Addrs()) != 1 {
		t.Errorf("IPv6-only pod has %v", h.Addrs())
	}
}

func TestValidateNamesTheField(t *testing.T) {
	for want, change := range map[string]func(*Spec){
		"name: ":                func(s *Spec) { s.Name = "Ä" },
		"at most 20":            func(s *Spec) { s.Name = strings.Repeat("a", 21) },
		"nodes: 0":              func(s *Spec) { s.Nodes = 0 },
		"pods per node: 201":    func(s *Spec) { s.PodsPerNode = 201 },
		"clients: -1":           func(s *Spec) { s.Clients = -1 },
		"pod network: \"ipip\"": func(s *Spec) { s.PodNetwork = "ipip" },
		"rp_filter: 3":          func(s *Spec) { s.RPFilter = 3 },
		"IPv4 LAN: ":            func(s *Spec) { s.LAN4 = netip.MustParsePrefix("10.0.0.0/25") },
		"IPv6 LAN: ":            func(s *Spec) { s.LAN6 = netip.MustParsePrefix("10.0.0.0/24") },
		"room for 1 nodes":      func(s *Spec) { s.ClusterCIDR4 = netip.MustParsePrefix("10.0.0.0/24") },
		"overlaps":              func(s *Spec) { s.LAN4 = netip.MustParsePrefix("10.244.7.0/24") },
	} {
		s := DefaultSpec("x")
		change(&s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestSpecSurvivesJSON(t *testing.T) {
	s := DefaultSpec("x")
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var back Spec
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(s, back) || difference(s, back) != "" {
		t.Errorf("got %+v, want %+v", back, s)
	}
	back.Masquerade = true
	if got := difference(s, back); !strings.HasPrefix(got, "Masquerade ") {
		t.Errorf("difference: got %q, want it to name Masquerade", got)
	}
}

func TestNodeObjects(t *testing.T) {
	s := DefaultSpec("x")
	s.Zones = []string{"east"}
	text, err := newCluster(s, "/cg").NodesYAML()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"name: node1", "address: 172.30.0.11\n    type: InternalIP", "fd30::b",
		"- 10.244.1.0/24", "fd44:0:0:1::/64", "topology.kubernetes.io/zone: east",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
