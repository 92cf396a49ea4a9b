package nft

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// attrs is a list of netlink attributes under construction. Transactions hold hundreds of
// thousands of attributes, so attrs appends to one buffer and allocates nothing else.
type attrs []byte

// header begins a message about objects of a family.
func header(family Family) attrs { return attrs{byte(family), unix.NFNETLINK_V0, 0, 0} }

// bytes appends an attribute with its padding.
func (a *attrs) bytes(typ uint16, data []byte) {
	at := a.open(typ)
	*a = append(*a, data...)
	a.close(at)
}

// str appends a string with a final zero byte, which the kernel requires.
func (a *attrs) str(typ uint16, s string) {
	at := a.open(typ)
	*a = append(append(*a, s...), 0)
	a.close(at)
}

// u32 appends a number in network order, as nf_tables has all its numbers.
func (a *attrs) u32(typ uint16, v uint32) {
	b := binary.NativeEndian.AppendUint16(*a, 8)
	b = binary.NativeEndian.AppendUint16(b, typ)
	*a = binary.BigEndian.AppendUint32(b, v)
}

// u64 is u32 for 64 bits.
func (a *attrs) u64(typ uint16, v uint64) {
	b := binary.NativeEndian.AppendUint16(*a, 12)
	b = binary.NativeEndian.AppendUint16(b, typ)
	*a = binary.BigEndian.AppendUint64(b, v)
}

// nest opens a nested attribute; close ends it.
func (a *attrs) nest(typ uint16) int { return a.open(typ | unix.NLA_F_NESTED) }

func (a *attrs) open(typ uint16) int {
	at := len(*a)
	b := binary.NativeEndian.AppendUint16(*a, 0)
	*a = binary.NativeEndian.AppendUint16(b, typ)
	return at
}

// close writes the length of the attribute that open began at this offset.
func (a *attrs) close(at int) {
	binary.NativeEndian.PutUint16((*a)[at:], uint16(len(*a)-at))
	for len(*a)%4 != 0 {
		*a = append(*a, 0)
	}
}

// data appends a value as nf_tables nests it.
func (a *attrs) data(typ uint16, v string) {
	at := a.nest(typ)
	inner := a.open(unix.NFTA_DATA_VALUE)
	*a = append(*a, v...)
	a.close(inner)
	a.close(at)
}

func (a *attrs) verdict(typ uint16, code int32, chain string) {
	at := a.nest(typ)
	inner := a.nest(unix.NFTA_DATA_VERDICT)
	a.u32(unix.NFTA_VERDICT_CODE, uint32(code))
	if chain != "" {
		a.str(unix.NFTA_VERDICT_CHAIN, chain)
	}
	a.close(inner)
	a.close(at)
}

// comment appends user data with nft's comment of an object, unless it is empty.
func (a *attrs) comment(typ uint16, text string) {
	if text == "" {
		return
	}
	at := a.open(typ)
	*a = append(*a, udataComment, byte(len(text)+1))
	*a = append(append(*a, text...), 0)
	a.close(at)
}

// Attributes iterates over netlink attributes by type and value, up to the first truncated
// one.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			n := int(binary.NativeEndian.Uint16(b))
			if n < unix.SizeofNlAttr || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofNlAttr:n]) {
				return
			}
			b = b[min(len(b), (n+3)&^3):]
		}
	}
}

// Attribute returns the last attribute of a type; nil: none.
func Attribute(b []byte, typ uint16) (value []byte) {
	for t, v := range Attributes(b) {
		if t == typ {
			value = v
		}
	}
	return value
}

// payload returns the attributes of a message; object is the message without its netlink
// header.
func payload(object []byte) []byte { return object[min(len(object), 4):] }

// Expressions iterates over the expressions of a rule (NFTA_RULE_EXPRESSIONS) by name, with
// their attributes.
func Expressions(list []byte) iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		for _, e := range Attributes(list) {
			if !yield(String(Attribute(e, unix.NFTA_EXPR_NAME)), Attribute(e, unix.NFTA_EXPR_DATA)) {
				return
			}
		}
	}
}

// String decodes a string attribute.
func String(b []byte) string { return unix.ByteSliceToString(b) }

// Number decodes a 32-bit attribute; 0 if it has another length.
func Number(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

func number64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

// udata is what programs store beside kernel objects, as type, length, value
// (libnftnl's udata.h). nft stores its own descriptions there.
type udata []byte

// add appends a value of up to 255 bytes.
func (u *udata) add(typ byte, value []byte) {
	*u = append(append(*u, typ, byte(len(value))), value...)
}

// u32 appends a number.
func (u *udata) u32(typ byte, v uint32) { u.add(typ, hostU32(v)) }

func (u *udata) str(typ byte, s string) {
	if s != "" {
		u.add(typ, append([]byte(s), 0))
	}
}

func (u udata) get(typ byte) []byte {
	for len(u) >= 2 && len(u) >= 2+int(u[1]) {
		if u[0] == typ {
			return u[2 : 2+int(u[1])]
		}
		u = u[2+int(u[1]):]
	}
	return nil
}

// comment returns nft's comment of a rule, chain, table or element.
func (u udata) comment() string {
	v := u.get(udataComment)
	if len(v) > 0 && v[len(v)-1] == 0 {
		v = v[:len(v)-1]
	}
	return string(v)
}

func hostU32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
