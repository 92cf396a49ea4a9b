package objects

import (
	"math"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// The words of an address are in one group, so that a server's clients share cache lines,
// and a full group does not fill others.
func TestFilterGroups(t *testing.T) {
	addr := func(n uint32) TCAddr { return TCAddr{W: [4]uint32{n}} }
	f := &PortFilter{Mask: 1<<17 - 1, Seed: 5}
	for what, test := range map[string]struct {
		addr  TCAddr
		words int
	}{"address": {addr(7), filterGroup}, "NodePorts": {TCAddr{}, filterGroupNodePorts}} {
		used, least, most := map[uint32]bool{}, f.Mask, uint32(0)
		for port := range uint16(math.MaxUint16) {
			index, _ := f.Place(&TCFrontendKey{Addr: test.addr, Port: port, Proto: uint8(model.TCP)})
			used[index], least, most = true, min(least, index), max(most, index)
		}
		if len(used) != test.words || most-least != uint32(test.words)-1 {
			t.Errorf("%s: %d words from %d to %d, want %d neighbors", what, len(used), least, most, test.words)
		}
	}
	groups := map[uint32]bool{}
	for n := range uint32(2000) {
		index, _ := f.Place(&TCFrontendKey{Addr: addr(n), Port: 80, Proto: uint8(model.TCP)})
		groups[index/filterGroup] = true
	}
	if len(groups) < 1000 {
		t.Errorf("2000 addresses have %d groups of 2048", len(groups))
	}
}
