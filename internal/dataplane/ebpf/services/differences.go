package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// expected is an entry that a Service port should have in a map.
type expected struct {
	note
	what string                    // the entry, for people
	read func() (got any, e error) // of the kernel
	want any
	tell func(any) string // the value, for people; nil: values are not shown
}

// Differences compares the entries of a Service port with the maps. It reads the maps beside
// writes, and then under the writers' lock only the entries that seemed to differ.
func (w *Writer) Differences(ctx context.Context, id intent.PortID, limit int) ([]string, error) {
	suspects, err := suspectsOf(ctx, w.expectedOf(id), limit)
	if err != nil || len(suspects) == 0 {
		return nil, err
	}
	return w.confirm(id, suspects)
}

// suspectsOf returns the entries that seem to differ, at most limit.
func suspectsOf(ctx context.Context, list []expected, limit int) (map[note]bool, error) {
	suspects := map[note]bool{}
	for i, e := range list {
		if i%entriesAtOnce == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		what, err := e.difference()
		if err != nil {
			return nil, err
		}
		if what != "" {
			suspects[e.note] = true
		}
		if len(suspects) >= limit {
			break
		}
	}
	return suspects, nil
}

// confirm describes the suspects that differ while no write is possible.
func (w *Writer) confirm(id intent.PortID, suspects map[note]bool) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var found []string
	for _, e := range w.table.expected(w.objects.Maps, id) {
		if !suspects[e.note] {
			continue
		}
		what, err := e.difference()
		if err != nil {
			return nil, err
		}
		if what != "" {
			found = append(found, what)
		}
	}
	return found, nil
}

func (w *Writer) expectedOf(id intent.PortID) []expected {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.table.expected(w.objects.Maps, id)
}

// difference describes how the kernel's entry differs; "" if it does not.
func (e *expected) difference() (string, error) {
	got, err := e.read()
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return fmt.Sprintf("%s: eBPF map %s has no entry", e.what, e.m), nil
	case err != nil:
		return "", fmt.Errorf("read eBPF map %s: %w", e.m, err)
	case got == e.want:
		return "", nil
	case e.tell == nil || e.tell(got) == e.tell(e.want):
		return fmt.Sprintf("%s: eBPF map %s has another entry", e.what, e.m), nil
	}
	return fmt.Sprintf("%s: eBPF map %s has %s, not %s", e.what, e.m, e.tell(got), e.tell(e.want)), nil
}

// expected returns the entries that a port should have. The caller holds the lock. Of source
// ranges the kernel finds the longest that contains one, so a larger one can hide that one is
// gone; the comparison after each full sync finds it.
func (t *portTable) expected(m map[string]*ebpf.Map, id intent.PortID) []expected {
	p := t.byID[id]
	if p == nil {
		return nil
	}
	var list []expected
	have := p.current()
	if have.written {
		list = append(list, entryOf(m, objects.TCMapServices, p.service, have.header, "the Service port", func(v objects.TCService) string {
			return fmt.Sprintf("%d endpoints for policy Cluster and %d for Local", v.Count[objects.ClusterSet], v.Count[objects.LocalSet])
		}))
	}
	for key, v := range have.frontends {
		if t.owners[key] == p.service {
			list = append(list, entryOf(m, objects.TCMapFrontends, key, v, "address "+frontendText(key), func(v objects.TCFrontend) string {
				return fmt.Sprintf("Service %d with routes %s from outside and %s from inside", v.Service, routeText(v.ExternalRoute),
					routeText(v.InternalRoute))
			}))
		}
	}
	addrs := map[uint32]string{}
	for _, e := range have.backends {
		addrs[e.id] = e.addr.String()
		list = append(list, entryOf(m, objects.TCMapBackends, e.id, e.value, "endpoint "+e.addr.String(),
			func(v objects.TCBackend) string { return objects.EndpointOf(v).String() }))
		key := endpointKey(p.protocol, e.addr)
		_, outOfSync := t.endpoints.outOfSync[key]
		if want, ok := t.endpointEntry(key); ok && !outOfSync {
			list = append(list, entryOf(m, objects.TCMapFrontends, key, want, "own address of endpoint "+e.addr.String(), nil))
		}
	}
	for set, ids := range p.slots {
		for i, id := range ids {
			if id == 0 { // a hole that an earlier run has left
				continue
			}
			what := fmt.Sprintf("place %d of the endpoints for policy %s", i, []string{"Cluster", "Local"}[set])
			list = append(list, entryOf(m, objects.TCMapSlots, slotKey(p.service, set, i), id, what, func(id uint32) string {
				if addr, known := addrs[id]; known {
					return addr
				}
				return fmt.Sprintf("unknown endpoint %d", id)
			}))
		}
	}
	for key := range have.ranges {
		list = append(list, entryOf(m, objects.TCMapSourceRanges, key, uint8(1), "source range "+objects.RangePrefix(key).String(), nil))
	}
	return list
}

// entryOf returns an expected entry of a map.
func entryOf[K, V comparable](m map[string]*ebpf.Map, name string, key K, want V, what string, tell func(V) string) expected {
	e := expected{note: note{name, key}, what: what, want: want, read: func() (any, error) {
		var got V
		err := m[name].Lookup(key, &got)
		return got, err
	}}
	if tell != nil {
		e.tell = func(v any) string { return tell(v.(V)) }
	}
	return e
}

func frontendText(key objects.TCFrontendKey) string {
	proto := model.Protocol(key.Proto)
	if key.Addr == (objects.TCAddr{}) {
		return fmt.Sprintf("NodePort %d/%s", objects.ToPort(key.Port), proto)
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(objects.FromAddr(key.Addr, key.Family), objects.ToPort(key.Port)), proto)
}

func routeText(route uint8) string {
	switch intent.Route(route) {
	case intent.Reject:
		return "reject"
	case intent.Drop:
		return "drop"
	case intent.ToCluster:
		return "Cluster"
	case intent.ToLocal:
		return "Local"
	}
	return fmt.Sprint(route)
}
