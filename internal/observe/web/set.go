package web

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// refreshEvery is the time between two lists of the nodes, and refreshTime limits one.
const (
	refreshEvery = 10 * time.Second
	refreshTime  = 30 * time.Second
)

// set has the nodes of the page.
type set struct {
	refresh func(context.Context) ([]Node, string, error)

	mu      sync.Mutex
	nodes   []*node
	next    int           // id
	changed chan struct{} // closed when nodes come or go
	lacks   string        // what the list lacks
	listed  time.Time
	listing bool
	failed  string // why the list is old
}

func newSet(nodes []Node, refresh func(context.Context) ([]Node, string, error)) *set {
	s := &set{refresh: refresh, changed: make(chan struct{})}
	for _, n := range nodes {
		s.nodes = append(s.nodes, newNode(s.next, n))
		s.next++
	}
	return s
}

// now returns the nodes, what the list lacks, and a channel that is closed when nodes come
// or go.
func (s *set) now() (nodes []*node, lacks string, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed != "" {
		return s.nodes, s.failed, s.changed
	}
	return s.nodes, s.lacks, s.changed
}

// node returns a node by its id; nil if it has gone.
func (s *set) node(id int) *node {
	nodes, _, _ := s.now()
	for _, n := range nodes {
		if n.id == id {
			return n
		}
	}
	return nil
}

// relistIfOld lists the nodes again if the list is old. It does not wait for the list.
func (s *set) relistIfOld() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refresh == nil || s.listing || time.Since(s.listed) < refreshEvery {
		return
	}
	s.listing = true
	go s.list()
}

func (s *set) list() {
	ctx, cancel := context.WithTimeout(context.Background(), refreshTime)
	defer cancel()
	nodes, lacks, err := s.refresh(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listing, s.listed = false, time.Now()
	if err != nil {
		s.failed = fmt.Sprintf("The list of nodes is old: %v.", err)
		return
	}
	s.failed, s.lacks = "", lacks
	s.replace(nodes)
}

// replace takes the present nodes, by their names. A node that stays keeps its connections.
func (s *set) replace(nodes []Node) {
	gone := map[string]*node{}
	for _, n := range s.nodes {
		gone[n.own().Name] = n
	}
	now := make([]*node, 0, len(nodes))
	changed := false
	for _, is := range nodes {
		n := gone[is.Name]
		delete(gone, is.Name)
		if n == nil {
			n, changed = newNode(s.next, is), true
			s.next++
		}
		n.update(is)
		now = append(now, n)
	}
	s.nodes = now
	for _, n := range gone {
		n.transport.CloseIdleConnections()
	}
	if changed || len(gone) > 0 {
		close(s.changed)
		s.changed = make(chan struct{})
	}
}
