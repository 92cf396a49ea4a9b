package services

import (
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// sets returns the sets that a decision wants, if have are those of the port: the ids of the
// endpoints, once for each share, or as the decision's table says.
func (e *portEntries) sets(p *intent.ServicePort, have [2][]uint32) (want [2][]uint32) {
	shares := [2][]int{objects.ClusterSet: p.Shares(intent.ToCluster), objects.LocalSet: p.Shares(intent.ToLocal)}
	ids, next := make([]uint32, len(p.Endpoints)), 0
	for i, endpoint := range p.Endpoints {
		for e.backends[next].addr != endpoint.Addr {
			next++
		}
		ids[i] = e.backends[next].id
	}
	for set := range want {
		if set == objects.ClusterSet && p.Table != nil {
			for _, i := range p.Table {
				want[set] = append(want[set], ids[i])
			}
			continue
		}
		for i, id := range ids {
			for range shares[set][i] {
				want[set] = append(want[set], id)
			}
		}
		want[set] = arrange(have[set], want[set])
	}
	return want
}

const memberFlags = uint8(objects.TCBackendFlagsBACKEND_CLUSTER_POLICY | objects.TCBackendFlagsBACKEND_LOCAL_POLICY)

// writeSets writes the sets of ports. First it writes the slots that readers of the old
// and the new size both use, then the sizes, and then it deletes the rest. With keep, a
// set that becomes empty stays unchanged, because an address may still lead to it.
func (t *portTable) writeSets(cs changes, keep bool) {
	cs.each(func(c *change) { t.addSlots(c, keep) })
	t.batches.slots.flush()
	cs.each(t.addHeader)
	t.batches.services.flush()
	cs.each(t.trimSlots)
	t.batches.noSlots.flush()
}

func (t *portTable) addSlots(c *change, keep bool) {
	have, e := c.have, c.have.entries
	want := e.sets(c.want, have.slots)
	c.header = e.newHeader(c.want)
	for set := range want {
		if keep && len(want[set]) == 0 {
			c.header.Count[set] = e.header.Count[set]
			continue
		}
		next := want[set]
		c.header.Count[set] = uint32(len(next))
		have.slots[set] = slices.Grow(have.slots[set], max(0, len(next)-len(have.slots[set])))
		known := len(have.slots[set])
		for i, id := range next {
			if i >= known || have.slots[set][i] != id {
				t.batches.slots.add(c, slotKey(have.service, set, i), id)
			}
		}
	}
}

func onSlot(c *change, k objects.TCSlotKey, id uint32) {
	slots, i := c.have.slotsOf(k)
	if i < len(*slots) {
		(*slots)[i] = id
	} else {
		*slots = append(*slots, id)
	}
}

// newHeader returns the header of a decision, without the sizes of its sets.
func (e *portEntries) newHeader(p *intent.ServicePort) objects.TCService {
	header := objects.TCService{Affinity: objects.Seconds(p.Affinity), Flags: uint16(objects.BalanceFlags(p)), SynLimit: p.SYNLimit}
	if e.tftp {
		header.Flags |= uint16(objects.TCServiceFlagsSERVICE_TFTP)
	}
	return header
}

func (t *portTable) addHeader(c *change) {
	if e := c.have.entries; !e.written || e.header != c.header {
		t.batches.services.add(c, c.have.service, c.header)
	}
}

func onHeader(c *change, _ uint32, header objects.TCService) {
	c.have.entries.header, c.have.entries.written = header, true
}

// trimSlots removes the slots beyond the sizes of the sets, the last first.
func (t *portTable) trimSlots(c *change) {
	for set := range c.have.slots {
		for i := len(c.have.slots[set]) - 1; i >= int(c.have.entries.header.Count[set]); i-- {
			t.batches.noSlots.add(c, slotKey(c.have.service, set, i), struct{}{})
		}
	}
}

func onNoSlot(c *change, k objects.TCSlotKey, _ struct{}) {
	slots, i := c.have.slotsOf(k)
	*slots = (*slots)[:i]
}

func slotKey(service uint32, set, i int) objects.TCSlotKey {
	key := objects.TCSlotKey{Service: service, Slot: uint32(i)}
	if set == objects.LocalSet {
		key.Slot |= objects.SlotLocal
	}
	return key
}

// slotsOf returns the set of a slot, and its place there.
func (p *port) slotsOf(key objects.TCSlotKey) (set *[]uint32, i int) {
	if key.Slot&objects.SlotLocal != 0 {
		return &p.slots[objects.LocalSet], int(key.Slot &^ objects.SlotLocal)
	}
	return &p.slots[objects.ClusterSet], int(key.Slot)
}

// arrange orders the wanted ids, of which some may repeat, with as few changed slots as
// possible. Existing ids keep their slots, and new ones and the last ones fill the holes.
func arrange(have, want []uint32) []uint32 {
	sorted := slices.Clone(want)
	slices.Sort(sorted)
	placed := make([]int, len(sorted)) // how many of an id are placed, where it is first in sorted
	next := make([]uint32, len(want))
	for i, id := range have[:min(len(have), len(next))] {
		first, wanted := slices.BinarySearch(sorted, id)
		if !wanted {
			continue
		}
		if at := first + placed[first]; at < len(sorted) && sorted[at] == id {
			next[i] = id
			placed[first]++
		}
	}
	hole, first := 0, 0
	for at, id := range sorted {
		if sorted[first] != id {
			first = at
		}
		if at-first < placed[first] {
			continue
		}
		for next[hole] != 0 {
			hole++
		}
		next[hole] = id
	}
	return next
}
