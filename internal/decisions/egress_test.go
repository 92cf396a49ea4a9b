package decisions

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// TestANodeHasItsOwnAddressesOfEgress: the annotation of this node's Node takes precedence over the flag. The last good
// value stays, and a bad one is one Problem.
func TestANodeHasItsOwnAddressesOfEgress(t *testing.T) {
	const here, none, same = "here", "none", "same"
	own := []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")}
	tr := New(intent.Config{NodeName: here}, donottrack.Config{})
	node := func(name, annotation string) model.Delta {
		n := &model.Node{Name: name}
		if name == here {
			n.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
		}
		if annotation != none {
			n.Annotations = map[string]string{EgressAddressesAnnotation: annotation, model.AnnotationPrefix + "other": "x"}
		}
		return model.Delta{Nodes: map[string]*model.Node{name: n}}
	}
	tr.Apply(node(here, none))
	tr.SetNodeAddrs(own)
	tr.SetEgress(egress.On, egress.Facts{
		Rules: &egress.Rules{}, Addresses: []netip.Prefix{netip.MustParsePrefix("203.0.113.2/32")}, Lasting: own,
		File: &egress.File{},
	})
	for _, step := range []struct {
		on, annotation string
		want           []netip.Addr
		changed        bool
		wrong          string // "": no Problem any more
	}{
		{here, "203.0.113.0/28", own[1:], true, same},
		{here, "203.0.113.0/28", own[1:], false, same},
		{"there", "198.51.100.1/32", own[1:], false, same},
		{here, "203.0.113.0", own[1:], false, `without annotation spillway.dev/egress-addresses: "203.0.113.0" is not an address range`},
		{here, "203.0.113.1/28", own[1:], false, `"203.0.113.1/28" is not how an address range is written`},
		{here, " 198.51.100.1/32 , 203.0.113.1/32", own[:2], true, ""},
		{here, "192.0.2.0/24", nil, true, "has no address in 192.0.2.0/24 of annotation spillway.dev/egress-addresses"},
		{here, "", nil, false, ""},
		{here, none, own[2:], true, same},
		{here, "bad", own[2:], false, `"bad" is not an address range`}, // the flag's stay
	} {
		c := tr.Apply(node(step.on, step.annotation))
		if got := tr.State().Node.Egress.Addresses; !slices.Equal(got, step.want) {
			t.Errorf("%q: addresses %v, want %v", step.annotation, got, step.want)
		}
		if changed := c.Services.Node != nil; changed != step.changed {
			t.Errorf("%q: the node has changed: %v", step.annotation, changed)
		}
		switch {
		case step.wrong == same && c.Egress != nil,
			step.wrong == "" && (c.Egress == nil || len(c.Egress) > 0),
			step.wrong != same && step.wrong != "" && (len(c.Egress) != 1 || !strings.Contains(c.Egress[0].What, step.wrong)):
			t.Errorf("%q: problems %v, want %q", step.annotation, c.Egress, step.wrong)
		}
	}
}
