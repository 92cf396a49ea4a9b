package inspect

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// Field is a field of a key or a value in a map, decoded: addresses and ports are text and
// numbers as people write them.
type Field struct {
	Name  string
	Value any
}

// PinnedMaps lists the maps that an instance pins and that Dump can read.
func PinnedMaps() ([]string, error) {
	spec, err := objects.LoadTC()
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects: %w", err)
	}
	var names []string
	for name, m := range spec.Maps {
		if m.Pinning == ebpf.PinByName && m.Key != nil && m.Value != nil && m.Type != ebpf.SkStorage && !objects.PerCPU(m.Type) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Dump calls each with every entry of a map of the instance pinned in a directory. The
// programs and the agent may change the map meanwhile. The error is os.ErrNotExist if there
// is no instance.
func Dump(bpffs, name string, each func(key, value []Field) error) error {
	spec, err := objects.LoadTC()
	if err != nil {
		return fmt.Errorf("read eBPF objects: %w", err)
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(bpffs), name), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("open map %s of %s: %w", name, bpffs, err)
	}
	defer m.Close()
	return DumpMap(m, spec.Maps[name], each)
}

// DumpMap is Dump of an open map with this layout.
func DumpMap(m *ebpf.Map, layout *ebpf.MapSpec, each func(key, value []Field) error) error {
	var key, value []byte
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		var d decoder
		k := d.decodeType("", layout.Key, key)
		if i := slices.IndexFunc(k, func(f Field) bool { return f.Name == "proto" }); i >= 0 {
			proto, _ := k[i].Value.(uint64)
			d.proto = model.Protocol(proto)
		}
		v := d.decodeType("", layout.Value, value)
		if layout.Name == objects.TCMapFlows {
			v = withAge(v, objects.BootSeconds())
		}
		if err := each(k, v); err != nil {
			return err
		}
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read map %s: %w", layout.Name, err)
	}
	return nil
}

// withAge replaces the time when a flow was opened by its age. A flow of an earlier ABI
// version has none.
func withAge(flow []Field, now uint32) []Field {
	for i, f := range flow {
		opened, _ := f.Value.(uint64)
		if f.Name == "opened" && opened == 0 {
			return slices.Delete(flow, i, i+1)
		} else if f.Name == "opened" {
			flow[i] = Field{"age_seconds", uint64(now - uint32(opened))}
		}
	}
	return flow
}

// decoder decodes the keys and values of a map.
type decoder struct {
	proto model.Protocol // of the key
}

// decodeType decodes data by its type. Fields of nested structs have names such as "reply.port".
func (d *decoder) decodeType(name string, t btf.Type, data []byte) []Field {
	big := isBigEndian(t)
	switch u := btf.UnderlyingType(t).(type) {
	case *btf.Struct:
		if u.Name == "addr" {
			return []Field{{name, addrOf(data, 0)}}
		}
		return d.decodeMembers(name, u.Members, data)
	case *btf.Union:
		return d.decodeMembers(name, d.member(u), data)
	case *btf.Array:
		size, err := btf.Sizeof(u.Type)
		if err != nil {
			return nil
		}
		if size == 1 && u.Nelems == 6 {
			return []Field{{name, net.HardwareAddr(data[:6]).String()}}
		}
		var out []Field
		for i := range int(u.Nelems) {
			out = append(out, d.decodeType(fmt.Sprintf("%s[%d]", name, i), u.Type, data[i*size:])...)
		}
		return out
	case *btf.Int:
		return []Field{{name, number(data[:u.Size], big)}}
	case *btf.Enum:
		return []Field{{name, number(data[:u.Size], big)}}
	}
	return nil
}

// member returns the member of a union that counts for the protocol: for UDP and ICMP the last
// one, otherwise the first.
func (d *decoder) member(u *btf.Union) []btf.Member {
	switch d.proto {
	case model.UDP, model.ICMP, model.ICMPv6:
		return u.Members[max(0, len(u.Members)-1):]
	}
	return u.Members[:min(1, len(u.Members))]
}

func (d *decoder) decodeMembers(name string, members []btf.Member, data []byte) []Field {
	family := uint8(0)
	for _, m := range members {
		if m.Name == "family" {
			family = data[m.Offset.Bytes()] // little-endian, or one byte
		}
	}
	var out []Field
	for _, m := range members {
		if m.Name == "pad" || m.BitfieldSize > 0 {
			continue
		}
		full := strings.Trim(name+"."+m.Name, ".") // a union has no name
		at := data[m.Offset.Bytes():]
		if s, ok := btf.UnderlyingType(m.Type).(*btf.Struct); ok && s.Name == "addr" {
			out = append(out, Field{full, addrOf(at, family)})
			continue
		}
		out = append(out, d.decodeType(full, m.Type, at)...)
	}
	return out
}

// addrOf decodes struct addr. Without a family, an address whose last words are zero is
// IPv4.
func addrOf(data []byte, family uint8) netip.Addr {
	six := netip.AddrFrom16([16]byte(data[:16]))
	if family == uint8(model.IPv4) || family == 0 && [12]byte(data[4:16]) == [12]byte{} {
		return netip.AddrFrom4([4]byte(data[:4]))
	}
	return six
}

// isBigEndian reports whether a type is __be16 or __be32.
func isBigEndian(t btf.Type) bool {
	for {
		def, ok := t.(*btf.Typedef)
		if !ok {
			return false
		}
		if def.Name == "__be16" || def.Name == "__be32" {
			return true
		}
		t = def.Type
	}
}

func number(data []byte, big bool) uint64 {
	var order binary.ByteOrder = binary.NativeEndian
	if big {
		order = binary.BigEndian
	}
	switch len(data) {
	case 1:
		return uint64(data[0])
	case 2:
		return uint64(order.Uint16(data))
	case 4:
		return uint64(order.Uint32(data))
	case 8:
		return order.Uint64(data)
	}
	return 0
}
