package services

import (
	"net/netip"
	"sync"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// formerServices is the number of deleted Service ports whose ids keep their names: events
// and counters of the last moments still name them. Ids are never used twice.
const formerServices = 4096

// portNames has the Service ports of the ids in the maps. Safe for concurrent use.
type portNames struct {
	mu     sync.RWMutex
	ports  map[uint32]intent.PortID
	former []uint32                            // deleted ids, the oldest first
	added  func(id uint32, port intent.PortID) // called with each id that gets a name; nil: not needed
}

func (s *portNames) set(id uint32, port intent.PortID) {
	if s == nil {
		return
	}
	s.mu.Lock()
	if s.ports == nil {
		s.ports = map[uint32]intent.PortID{}
	}
	s.ports[id] = port
	s.mu.Unlock()
	if s.added != nil {
		s.added(id, port)
	}
}

// remove records that the id is no longer in use.
func (s *portNames) remove(id uint32) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.former = append(s.former, id)
	if len(s.former) > formerServices {
		delete(s.ports, s.former[0])
		s.former = s.former[1:]
	}
}

// port returns the Service port of an id.
func (s *portNames) port(id uint32) (port intent.PortID, known bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	port, known = s.ports[id]
	return port, known
}

// selected returns the ids of the Service ports that a function selects.
func (s *portNames) selected(selects func(intent.PortID) bool) (ids []uint32) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for id, p := range s.ports {
		if selects(p) {
			ids = append(ids, id)
		}
	}
	return ids
}

// of returns the ids of Service ports. A port that was deleted and came again has several.
func (s *portNames) of(ports []intent.PortID) map[uint32]intent.PortID {
	wanted := make(map[intent.PortID]bool, len(ports))
	for _, p := range ports {
		wanted[p] = true
	}
	ids := make(map[uint32]intent.PortID, len(ports))
	s.mu.RLock()
	defer s.mu.RUnlock()
	for id, p := range s.ports {
		if wanted[p] {
			ids[id] = p
		}
	}
	return ids
}

// frontendAddrs counts the frontends of each address. It has its own lock, because
// interfaces change on their own. A nil *frontendAddrs counts nothing.
type frontendAddrs struct {
	mu      sync.RWMutex
	refs    map[netip.Addr]int
	changed func() // called when an address is added or removed; nil: not needed
}

func (s *frontendAddrs) has(a netip.Addr) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.refs[a] > 0
}

// reset replaces all counts by those of these frontends.
func (s *frontendAddrs) reset(owners map[objects.TCFrontendKey]uint32) {
	refs := make(map[netip.Addr]int, len(owners))
	for key := range owners {
		if a := objects.FromAddr(key.Addr, key.Family); !a.IsUnspecified() {
			refs[a]++
		}
	}
	s.mu.Lock()
	s.refs = refs
	s.mu.Unlock()
	s.notify()
}

// count adds 1 or -1 to the frontends of an address. NodePorts have no address.
func (s *frontendAddrs) count(key objects.TCFrontendKey, by int) {
	a := objects.FromAddr(key.Addr, key.Family)
	if s == nil || a.IsUnspecified() {
		return
	}
	s.mu.Lock()
	before := s.refs[a]
	if s.refs[a] = before + by; s.refs[a] == 0 {
		delete(s.refs, a)
	}
	s.mu.Unlock()
	if before == 0 || before+by == 0 {
		s.notify()
	}
}

func (s *frontendAddrs) notify() {
	if s.changed != nil {
		s.changed()
	}
}
