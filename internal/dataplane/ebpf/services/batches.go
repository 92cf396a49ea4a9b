package services

import (
	"fmt"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// portBatches are the batches of a portTable, one for each stage of a write.
type portBatches struct {
	backends  batch[uint32, objects.TCBackend]
	slots     batch[objects.TCSlotKey, uint32]
	services  batch[uint32, objects.TCService]
	ranges    batch[objects.TCRangeKey, uint8]
	frontends batch[objects.TCFrontendKey, objects.TCFrontend]
	addrs     batch[objects.TCFrontendKey, objects.TCFrontend] // endpoints' own addresses

	noFrontends batch[objects.TCFrontendKey, struct{}]
	noRanges    batch[objects.TCRangeKey, struct{}]
	noServices  batch[uint32, struct{}]
	noSlots     batch[objects.TCSlotKey, struct{}]
	noBackends  batch[uint32, int] // with the index in portEntries.backends
	noAddrs     batch[objects.TCFrontendKey, struct{}]
}

// begin returns the table's batches.
func (t *portTable) begin() *portBatches {
	if t.batches != nil {
		return t.batches
	}
	w := &portBatches{}
	w.backends = puts(&t.backends, t.onBackend, func(_ uint32, v objects.TCBackend) (string, any) { return "endpoint", objects.EndpointOf(v) })
	w.slots = puts(&t.slots, onSlot, func(k objects.TCSlotKey, _ uint32) (string, any) { return "slot", k.Service })
	w.services = puts(&t.services, onHeader, func(k uint32, _ objects.TCService) (string, any) { return "Service", k })
	w.ranges = puts(&t.ranges, onRange, func(k objects.TCRangeKey, _ uint8) (string, any) { return "source range", objects.RangePrefix(k) })
	w.frontends = puts(&t.frontends, t.onFrontend, func(k objects.TCFrontendKey, _ objects.TCFrontend) (string, any) {
		return "address", objects.FromAddr(k.Addr, k.Family)
	})
	w.noFrontends = deletes(&t.frontends, t.onNoFrontend)
	w.noRanges = deletes(&t.ranges, func(c *change, k objects.TCRangeKey, _ struct{}) { delete(c.have.entries.ranges, k) })
	w.noServices = deletes(&t.services, func(c *change, _ uint32, _ struct{}) {
		c.have.entries.header, c.have.entries.written = objects.TCService{}, false
	})
	w.noSlots = deletes(&t.slots, onNoSlot)
	w.noBackends = deletes(&t.backends, t.onNoBackend)
	w.addrs = addrWrites[objects.TCFrontend](t, false)
	w.noAddrs = addrWrites[struct{}](t, true)
	t.batches = w
	return w
}

// puts returns a batch that fails the change of an entry that the kernel refuses. name
// describes an entry.
func puts[K, V any](m *objects.Map, written func(*change, K, V), name func(K, V) (what string, which any)) batch[K, V] {
	return batch[K, V]{m: m, written: written, failed: func(c *change, k K, v V, err error) {
		what, which := name(k, v)
		c.err = objects.WriteError(what, which, err)
	}}
}

func deletes[K, V any](m *objects.Map, written func(*change, K, V)) batch[K, V] {
	return batch[K, V]{m: m, delete: true, written: written, failed: func(c *change, k K, _ V, err error) {
		c.err = fmt.Errorf("delete entry %v from eBPF map %s: %w", k, *m, err)
	}}
}

// addrWrites returns a batch of endpoints' own addresses, which fails no port.
func addrWrites[V any](t *portTable, remove bool) batch[objects.TCFrontendKey, V] {
	return batch[objects.TCFrontendKey, V]{m: &t.frontends, delete: remove,
		written: func(_ *change, k objects.TCFrontendKey, _ V) { delete(t.endpoints.outOfSync, k) },
		failed:  func(_ *change, k objects.TCFrontendKey, _ V, err error) { t.endpoints.fail(k, err) },
	}
}

// release frees the memory that a large write has used.
func (t *portTable) release() {
	if w := t.batches; w != nil {
		w.backends.release()
		w.slots.release()
		w.services.release()
		w.ranges.release()
		w.frontends.release()
		w.addrs.release()
		w.noFrontends.release()
		w.noRanges.release()
		w.noServices.release()
		w.noSlots.release()
		w.noBackends.release()
		w.noAddrs.release()
	}
	t.endpoints.release()
}
