package flows

import (
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// clientFlows has the numbers of confirmed flows by client and by its network, as in
// the map sources. The programs count flows that open and close. The sweep corrects the
// counts for flows that have timed out or were evicted.
type clientFlows struct {
	seed   uint32
	counts []uint32
	// created and swept are the numbers of flows until the counting began.
	created, swept uint64
}

func newClientFlows(seed uint32) *clientFlows {
	return &clientFlows{seed: seed, counts: make([]uint32, objects.Sources)}
}

// count counts a flow by its forward entry.
func (c *clientFlows) count(k *objects.TCTuple, f *objects.TCFlow) {
	if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_CONFIRMED != 0 && objects.TCFlowState(f.State) != objects.TCFlowStateFLOW_CLOSED {
		c.counts[objects.ClientHash(c.seed, k)%objects.Sources]++
		if k.Family == uint8(model.IPv6) {
			c.counts[objects.ClientNetworkHash(c.seed, k)%objects.Sources]++
		}
	}
}

// same reports whether the programs have not changed what the sweep before has written, nil
// if there was none: no flow was opened, closed, evicted or swept. The map is large, and most
// nodes are idle for long.
func (c *clientFlows) same(before *clientFlows) bool {
	return before != nil && c.created == before.created && c.swept == before.swept && slices.Equal(c.counts, before.counts)
}

// write replaces the content of the map.
func (c *clientFlows) write(m *ebpf.Map) error {
	keys := make([]uint32, objects.Sources)
	for i := range keys {
		keys[i] = uint32(i)
	}
	if _, err := m.BatchUpdate(keys, c.counts, nil); err != nil {
		return fmt.Errorf("write flows by client: %w", err)
	}
	return nil
}
