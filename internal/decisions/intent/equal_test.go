package intent

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"
)

// TestEveryFieldCounts changes one field after another. A comparison that leaves one out would
// keep the kernel as it was.
func TestEveryFieldCounts(t *testing.T) {
	addr := netip.MustParseAddrPort("192.0.2.1:80")
	port := func() *ServicePort {
		return &ServicePort{
			Frontends: []Frontend{{SourceRanges: []netip.Prefix{netip.PrefixFrom(addr.Addr(), 32)}}}, Endpoints: []Endpoint{{Addr: addr}},
			Weights: []uint16{1}, Table: []uint32{0}, ServingUnselected: []Endpoint{{}}, Lingering: []netip.AddrPort{addr},
		}
	}
	for name, change := range changes(reflect.TypeFor[ServicePort]()) {
		a, b := port(), port()
		change(reflect.ValueOf(b).Elem())
		if want := name == ".Triggered"; a.Equal(b) != want || b.Equal(a) != want {
			t.Errorf("ServicePort%s: equal is %v, want %v", name, !want, want)
		}
	}
	for name, change := range changes(reflect.TypeFor[Node]()) {
		var a, b Node
		change(reflect.ValueOf(&b).Elem())
		if sameNode(a, b) || sameNode(b, a) {
			t.Errorf("Node%s: the same, although it differs", name)
		}
	}
	a, b := port(), port()
	if !a.Equal(b) || !sameNode(Node{}, Node{}) {
		t.Error("equal values differ")
	}
	a.Frontends[0].SourceRanges, b.Frontends[0].SourceRanges = nil, []netip.Prefix{}
	if a.Equal(b) {
		t.Error("all clients are allowed, or none: the same")
	}
}

// changes returns, for each field below a struct, a function that changes it.
func changes(of reflect.Type) map[string]func(reflect.Value) {
	all := map[string]func(reflect.Value){}
	add := func(name string, below reflect.Type, at func(reflect.Value) reflect.Value) {
		for path, change := range changes(below) {
			all[name+path] = func(v reflect.Value) { change(at(v)) }
		}
	}
	inside := func(f reflect.Type) bool { // a struct of this module
		return f.Kind() == reflect.Struct && f.NumField() > 0 && f.Field(0).IsExported()
	}
	for _, f := range reflect.VisibleFields(of) {
		name, field := "."+f.Name, func(v reflect.Value) reflect.Value { return v.FieldByIndex(f.Index) }
		switch {
		case inside(f.Type):
			add(name, f.Type, field)
		case f.Type.Kind() == reflect.Slice:
			all[name] = func(v reflect.Value) { field(v).Set(reflect.Append(field(v), reflect.Zero(f.Type.Elem()))) }
			if inside(f.Type.Elem()) {
				add(name+"[0]", f.Type.Elem(), func(v reflect.Value) reflect.Value { return field(v).Index(0) })
			}
		default:
			all[name] = func(v reflect.Value) { field(v).Set(other(field(v))) }
		}
	}
	return all
}

// other returns a value that differs from another one.
func other(v reflect.Value) reflect.Value {
	switch v.Kind() {
	case reflect.Bool:
		return reflect.ValueOf(!v.Bool())
	case reflect.String:
		return reflect.ValueOf(v.String() + "x").Convert(v.Type())
	}
	if v.CanInt() || v.CanUint() {
		one := reflect.ValueOf(1).Convert(v.Type())
		if v.IsZero() {
			return one
		}
		return reflect.Zero(v.Type())
	}
	for _, known := range []any{netip.MustParseAddr("192.0.2.9"), netip.MustParseAddrPort("192.0.2.9:9"), time.Unix(1, 0)} {
		if reflect.TypeOf(known) == v.Type() {
			return reflect.ValueOf(known)
		}
	}
	panic(fmt.Sprintf("no other value is known of a field of type %v", v.Type()))
}
