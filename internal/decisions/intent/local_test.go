package intent

import (
	"reflect"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func TestLocalTrafficIsWhatTheModeSays(t *testing.T) {
	object := &model.Node{Name: here, PodCIDRs: prefixes("10.1.0.0/24", "fd00:1::/64")}
	other := &model.Node{Name: there, PodCIDRs: prefixes("10.1.1.0/24")}
	for _, row := range []struct {
		mode LocalMode
		name string
		want LocalTraffic
	}{
		{"", "", LocalTraffic{Sources: prefixes("10.0.0.0/8")}},
		{LocalClusterCIDR, "", LocalTraffic{Sources: prefixes("10.0.0.0/8")}},
		{LocalNodeCIDR, "", LocalTraffic{Sources: prefixes("10.1.0.0/24", "fd00:1::/64")}},
		{LocalBridgeInterface, "cni0", LocalTraffic{Interface: "cni0"}},
		{LocalInterfaceNamePrefix, "veth", LocalTraffic{Prefix: "veth"}},
	} {
		cfg := Config{NodeName: here, ClusterCIDRs: prefixes("10.0.0.0/8"), DetectLocal: row.mode, LocalInterface: row.name}
		if err := cfg.Validate(); err != nil {
			t.Errorf("%s: %v", row.mode, err)
		}
		tr := New(cfg)
		if got := tr.Apply(delta(object, other)).Node.Local; !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s: %+v, want %+v", row.mode, got, row.want)
		}
	}
	tr := New(Config{NodeName: here})
	if got := tr.Apply(delta(object, other)).Node.Local.Sources; !reflect.DeepEqual(got, object.PodCIDRs) {
		t.Errorf("without --cluster-cidr pods are told by %v", got)
	}
	tr = New(Config{NodeName: here, DetectLocal: LocalNodeCIDR})
	tr.Apply(delta(other))
	if c := tr.Apply(delta(object)); c.Node == nil || len(c.Node.Local.Sources) != 2 {
		t.Errorf("podCIDRs that come later change %+v", c.Node)
	}
}

func TestPrimaryNodePortsAreOnTheFirstAddressOfEachFamily(t *testing.T) {
	tr := New(Config{NodeName: here, NodePortPrimary: true})
	setNodeAddrs(tr, addrs("10.0.0.1", "10.0.0.2", "10.0.0.3", "2001:db8::1", "2001:db8::2"))
	c := tr.Apply(delta(&model.Node{Name: here, Addresses: addrs("10.0.0.2", "10.0.0.1", "2001:db8::2")}))
	if got := stringsOf(c.Node.NodePortAddrs); !equalStrings(got, []string{"10.0.0.2", "2001:db8::2"}) {
		t.Errorf("NodePorts on %v", got)
	}
}

func TestANodeThatIsToGoIsLeaving(t *testing.T) {
	for _, row := range []struct {
		name   string
		expect bool
		nodes  []*model.Node // after one another; nil: gone
		want   []bool
	}{
		{"API server", true, []*model.Node{{Name: here}, {Name: here, Leaving: true}, {Name: here}, nil}, []bool{false, true, false, true}},
		{"manifests", false, []*model.Node{nil, {Name: here, Leaving: true}, nil}, []bool{false, true, false}},
	} {
		tr := New(Config{NodeName: here, ExpectNode: row.expect})
		if got := tr.State().Node.Leaving; got != row.expect {
			t.Errorf("%s: leaving %v before any Node", row.name, got)
		}
		for i, n := range row.nodes {
			tr.Apply(model.Delta{Nodes: map[string]*model.Node{here: n}})
			if got := tr.State().Node.Leaving; got != row.want[i] {
				t.Errorf("%s, step %d: leaving %v, want %v", row.name, i, got, row.want[i])
			}
		}
	}
}

func TestUnknownPoliciesAreOfTheNode(t *testing.T) {
	yes, no := true, false
	tr := New(Config{NodeName: here})
	for i, step := range []struct {
		delta model.Delta
		want  bool
	}{
		{model.Delta{Full: true, NetworkPoliciesUnknown: &yes}, true},
		{model.Delta{Pods: map[model.Name]*model.Pod{{Name: "x"}: nil}}, true},
		{model.Delta{NetworkPoliciesUnknown: &no}, false},
		{model.Delta{NetworkPoliciesUnknown: &yes}, true},
		{model.Delta{Full: true}, false},
	} {
		tr.Apply(step.delta)
		if got := tr.State().Node.PoliciesUnknown; got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
}
