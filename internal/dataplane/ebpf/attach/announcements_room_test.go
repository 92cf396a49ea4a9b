package attach

import (
	"net/netip"
	"testing"
	"time"
)

// mapOfPods is the number of entries of the eBPF map pods (bpf/maps.h).
const mapOfPods = 1 << 14

// The pods of one tenant, with NET_ADMIN, take all addresses that they may, alone and two at a time:
// an entry of the map marks an address that two announce. Pods of others get theirs.
func TestPodsCannotFillTheMap(t *testing.T) {
	const pods = 250
	table := &podTable{
		ports: map[int]*podPort{}, paths: newPathTable(nil), announced: announcements{},
		owners: map[netip.Addr]owner{}, learned: []neighbor{},
	}
	named := map[netip.Addr]bool{}
	table.facts = func(a netip.Addr) Fact {
		if named[a] {
			return PodHere
		}
		return Unknown
	}
	announce := func(ifindex int, a netip.Addr) {
		p := table.ports[ifindex]
		if p == nil {
			p = &podPort{ifindex: ifindex, master: 1000}
			table.ports[ifindex] = p
		}
		p.addrs = append(p.addrs, podAddr{addr: a})
		table.paths.known[pathKey{addr: a}] = path{devices: []int{1000}}
	}
	at := func(i int) netip.Addr {
		return netip.AddrFrom16([16]byte{0: 0xfd, 12: byte(i >> 24), 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
	}
	for i := range pods {
		own := at(1<<20 + i)
		named[own] = true
		announce(1+i, own)
		if i == pods-1 {
			break // of another tenant
		}
		for j := range maxAddrs / 2 {
			announce(1+i, at(i<<10|j))
			announce(1+i, at(1<<24|i/2<<10|j)) // the next or the last one announces it as well
		}
	}
	table.collect(false)
	got := table.decide(time.Now())
	if free := mapOfPods - len(got); free < mapOfPods/2-pods {
		t.Errorf("%d addresses are in the map, which has room for %d", len(got), mapOfPods)
	}
	for a := range named {
		if got[a].Ifindex == 0 {
			t.Fatalf("the address %s of a Pod is not reached", a)
		}
	}
	alone, contested := 0, 0
	for a, p := range got {
		switch {
		case p.Ifindex == 0:
			contested++
		case !named[a]:
			alone++
		}
	}
	if alone == 0 || contested == 0 {
		t.Errorf("%d addresses without a Pod and %d contested ones are in the map, want some of each", alone, contested)
	}
}
