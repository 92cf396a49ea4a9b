package ebpf

import (
	"sync"

	"spillway.dev/spillway/internal/decisions/intent"
)

// formerServices is the number of deleted Service ports whose ids keep their names: events
// and counters of the last moments still name them. Ids are never used twice.
const formerServices = 4096

// serviceNames has the Service ports of the ids in the maps. Safe for concurrent use.
type serviceNames struct {
	mu     sync.RWMutex
	ports  map[uint32]intent.PortID
	former []uint32 // deleted ids, the oldest first
}

func (s *serviceNames) set(id uint32, port intent.PortID) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ports == nil {
		s.ports = map[uint32]intent.PortID{}
	}
	s.ports[id] = port
}

// remove records that the id is no longer in use.
func (s *serviceNames) remove(id uint32) {
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
func (s *serviceNames) port(id uint32) (port intent.PortID, known bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	port, known = s.ports[id]
	return port, known
}

// of returns the ids of Service ports. A port that was deleted and came again has several.
func (s *serviceNames) of(ports []intent.PortID) map[uint32]intent.PortID {
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
