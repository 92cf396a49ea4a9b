package intent

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// With the balance Maglev, a table leads from a client's hash to an endpoint. It follows from the
// endpoints and their shares alone, so all nodes that choose among the same endpoints have the
// same table, whatever happened before. Each slot gives every endpoint a pseudorandom score and
// takes the best one, divided by the endpoint's share: weighted rendezvous hashing (Thaler and
// Ravishankar, 1996). A change moves only slots of the endpoints that lose shares, or to those
// that gain some. The tables of Google's Maglev (Eisenbud and others, NSDI 2016) are more even, but
// move more slots than necessary: docs/how-to/choose-endpoints.md has the figures.

// MaglevSizes are the sizes that a table may have: primes, as in Cilium.
var MaglevSizes = []int{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071}

// DefaultMaglevSize is 100 slots for each of 160 endpoints.
const DefaultMaglevSize = 16381

// spread returns ServicePort.Table for a decided port. before is the decision before it, or nil:
// its table makes the work follow the change.
func spread(size int, p, before *ServicePort) []uint32 {
	r := ring{shares: p.Shares(ToCluster), ids: make([]uint64, len(p.Endpoints))}
	for i := range p.Endpoints {
		r.ids[i] = endpointHash(p.Endpoints[i].Addr)
		if r.shares[i] > 0 {
			r.used = append(r.used, uint32(i))
		}
	}
	if len(r.used) == 0 {
		return nil
	}
	r.equal = p.Weights == nil
	table := make([]uint32, size)
	if r.equal && before != nil && before.Weights == nil && len(before.Table) == size {
		r.fillFrom(table, p, before)
		return table
	}
	for slot := range table {
		table[slot] = r.best(uint32(slot), noEndpoint, r.used)
	}
	return table
}

// noEndpoint is the index of none.
const noEndpoint = ^uint32(0)

// ring is what the slots of a table choose from.
type ring struct {
	ids    []uint64 // hash of each endpoint
	shares []int
	used   []uint32 // those with a share
	equal  bool     // all of these have the same
}

// fillFrom fills the table from that of another decision, if both have equal shares.
func (r *ring) fillFrom(table []uint32, p, before *ServicePort) {
	was := before.Shares(ToCluster)
	now := make([]uint32, len(before.Endpoints)) // index of an endpoint of before
	var added []uint32
	i := 0
	for k := range now {
		now[k] = noEndpoint
		for i < len(p.Endpoints) && p.Endpoints[i].Addr.Compare(before.Endpoints[k].Addr) < 0 {
			added = r.appendUsed(added, i)
			i++
		}
		if i == len(p.Endpoints) || p.Endpoints[i].Addr != before.Endpoints[k].Addr {
			continue
		}
		if r.shares[i] > 0 && was[k] > 0 {
			now[k] = uint32(i)
		} else {
			added = r.appendUsed(added, i)
		}
		i++
	}
	for ; i < len(p.Endpoints); i++ {
		added = r.appendUsed(added, i)
	}
	for slot, old := range before.Table {
		if kept := now[old]; kept != noEndpoint {
			table[slot] = r.best(uint32(slot), kept, added)
		} else {
			table[slot] = r.best(uint32(slot), noEndpoint, r.used)
		}
	}
}

func (r *ring) appendUsed(list []uint32, i int) []uint32 {
	if r.shares[i] == 0 {
		return list
	}
	return append(list, uint32(i))
}

// best returns the endpoint that a slot prefers to the others of a list and to first.
func (r *ring) best(slot, first uint32, list []uint32) uint32 {
	if len(list) == 0 {
		return first
	}
	best, top := first, uint64(0)
	if first != noEndpoint {
		top = slotScore(r.ids[first], slot)
	}
	for _, i := range list {
		score := slotScore(r.ids[i], slot)
		if best == noEndpoint || r.prefers(i, score, best, top) {
			best, top = i, score
		}
	}
	return best
}

// prefers compares -log(score)/share of two endpoints: with it, an endpoint wins a slot as often
// as its share says. Whole numbers make all processors agree.
func (r *ring) prefers(a uint32, scoreA uint64, b uint32, scoreB uint64) bool {
	if !r.equal {
		costA, costB := negativeLog(scoreA)*uint64(r.shares[b]), negativeLog(scoreB)*uint64(r.shares[a])
		if costA != costB {
			return costA < costB
		}
	}
	if scoreA != scoreB {
		return scoreA > scoreB
	}
	return r.ids[a] > r.ids[b]
}

// slotScore is the hash of an endpoint and a slot.
func slotScore(id uint64, slot uint32) uint64 { return mix64(id + uint64(slot)*0x9e3779b97f4a7c15) }

// endpointHash is the same on all nodes.
func endpointHash(a netip.AddrPort) uint64 {
	b := a.Addr().As16()
	h := mix64(binary.BigEndian.Uint64(b[:8]) + uint64(a.Port()))
	return mix64(h ^ binary.BigEndian.Uint64(b[8:]))
}

// mix64 is the finalizer of SplitMix64 (Steele and others, 2014).
func mix64(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// logBits is the number of bits after the point of negativeLog.
const logBits = 32

// logTable has log2(1 + i/256) with logBits bits after the point.
var logTable = func() (t [257]uint64) {
	for i := range t {
		t[i] = fractionLog(uint64(256+i) << 22)
	}
	return t
}()

// fractionLog returns log2(x / 2^30) of a number from 2^30 to 2^31, one bit after the other:
// the logarithm of the square is twice that of the number.
func fractionLog(x uint64) (log uint64) {
	if x == 1<<31 {
		return 1 << logBits
	}
	for range logBits {
		x = x * x >> 30
		log <<= 1
		if x >= 1<<31 {
			x >>= 1
			log++
		}
	}
	return log
}

// negativeLog returns -log2((score+1) / 2^64), with logBits bits after the point. It falls as
// the score rises.
func negativeLog(score uint64) uint64 {
	n := bits.Len64(score)
	if n == 0 {
		return 64 << logBits
	}
	mantissa := score << (64 - n)                        // its highest bit is set
	i, rest := mantissa>>55&0xff, mantissa>>23&(1<<32-1) // eight bits, and the 32 after them
	log := logTable[i] + (logTable[i+1]-logTable[i])*(rest>>8)>>24
	return 64<<logBits - uint64(n-1)<<logBits - log
}

// unservedByTable returns the Problem of a port with endpoints that no slot leads to.
func unservedByTable(service model.Name, p *ServicePort) (problem model.Problem, any bool) {
	slots := make([]int, len(p.Endpoints))
	for _, i := range p.Table {
		slots[i]++
	}
	missing := 0
	for i, shares := range p.Shares(ToCluster) {
		if shares > 0 && slots[i] == 0 {
			missing++
		}
	}
	if len(p.Table) == 0 || missing == 0 {
		return problem, false
	}
	return model.ServiceProblem(service, annotationField(BalanceAnnotation),
		fmt.Sprintf("%s leaves out %d of %d %s endpoints of port %d/%s: the table has only %d entries; raise --maglev-table-size on all nodes",
			Maglev, missing, len(p.Endpoints), p.ID.Family, p.ID.Number, p.ID.Protocol, len(p.Table))), true
}
