package services

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// dumpedMap gives entries that a fuzzer made, as a map of the kernel does.
type dumpedMap struct {
	objects.Map
	data *bytes.Reader
}

// BatchLookup implements Map.
func (m dumpedMap) BatchLookup(_ *ebpf.MapBatchCursor, keys, values any, _ *ebpf.BatchOptions) (int, error) {
	k, v := reflect.ValueOf(keys), reflect.ValueOf(values)
	for n := range k.Len() {
		if binary.Read(m.data, binary.NativeEndian, k.Index(n).Addr().Interface()) != nil ||
			binary.Read(m.data, binary.NativeEndian, v.Index(n).Addr().Interface()) != nil {
			return n, ebpf.ErrKeyNotExist
		}
	}
	return k.Len(), nil
}

// FuzzReadBack reads entries of maps that hold anything: those of slots, and of one
// port's frontends, backends and ranges. Memory follows the entries, not the numbers
// in them, and what is read makes a Service port that can be compared.
func FuzzReadBack(f *testing.F) {
	slot := func(service, slot, id uint32) []byte {
		var b []byte
		for _, n := range []uint32{service, slot, id} {
			b = binary.NativeEndian.AppendUint32(b, n)
		}
		return b
	}
	f.Add(append(slot(1, 0, 7), slot(1, 1|objects.SlotLocal, 8)...))
	f.Add(slot(1, 0x7fffffff, 1))
	f.Add(slot(0xffffffff, 0xffffffff, 0xffffffff))
	f.Add(bytes.Repeat([]byte{0xff}, 200))
	f.Add(append(make([]byte, 100), 1, 2, 3, 4, 5, 6, 7, 8, 9))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, sum := newPort(1), 0
		table := &portTable{slots: dumpedMap{data: bytes.NewReader(data)}}
		if err := table.readSlots(func(uint32) *port { return p }); err != nil {
			t.Fatal(err)
		}
		for _, ids := range p.slots {
			sum += len(ids)
		}
		if sum > 2*maxSlots {
			t.Fatalf("%d bytes of a map become %d slots", len(data), sum)
		}
		r := bytes.NewReader(data)
		var header objects.TCService
		var key objects.TCFrontendKey
		var value objects.TCFrontend
		var backend objects.TCBackend
		var ranges objects.TCRangeKey
		for _, v := range []any{&header, &key, &value, &backend, &ranges} {
			if n := binary.Size(v); n < 0 || binary.Read(r, binary.NativeEndian, v) != nil {
				break
			}
		}
		p.entries.header, p.protocol = header, model.Protocol(key.Proto)
		p.entries.frontends[key], p.entries.ranges[ranges] = value, true
		if objects.IsClusterRange(ranges) {
			delete(p.entries.ranges, ranges)
		}
		p.intentFrontends()
		endpoints, _, _ := p.intentEndpoints()
		for _, e := range endpoints {
			endpointKey(p.protocol, e.Addr)
		}
	})
}
