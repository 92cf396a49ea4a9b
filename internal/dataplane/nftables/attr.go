package nftables

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// attrs is a list of netlink attributes under construction. Batches hold
// hundreds of thousands of them, so it appends to one buffer and allocates
// nothing else.
type attrs []byte

// bytes appends an attribute with its padding.
func (a *attrs) bytes(typ uint16, data []byte) {
	b := binary.NativeEndian.AppendUint16(*a, uint16(4+len(data)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	*a = b
}

// str appends a string, ended by a zero as the kernel wants names.
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

// close writes the length of the attribute that open began at this place.
func (a *attrs) close(at int) {
	binary.NativeEndian.PutUint16((*a)[at:], uint16(len(*a)-at))
	for len(*a)%4 != 0 {
		*a = append(*a, 0)
	}
}

// udata is user data: what nft writes beside kernel objects for itself and for
// readers, as type, length, value (libnftnl's udata.h).
type udata []byte

func (u *udata) add(typ byte, value []byte) {
	*u = append(append(*u, typ, byte(len(value))), value...)
}

func (u *udata) u32(typ byte, v uint32) {
	u.add(typ, binary.NativeEndian.AppendUint32(nil, v))
}

func (u *udata) str(typ byte, s string) { u.add(typ, append([]byte(s), 0)) }

// get returns the value of a type, nil if there is none.
func (u udata) get(typ byte) []byte {
	for len(u) >= 2 && len(u) >= 2+int(u[1]) {
		if u[0] == typ {
			return u[2 : 2+int(u[1])]
		}
		u = u[2+int(u[1]):]
	}
	return nil
}

// getString returns a comment.
func (u udata) getString(typ byte) string {
	v := u.get(typ)
	if len(v) > 0 && v[len(v)-1] == 0 {
		v = v[:len(v)-1]
	}
	return string(v)
}
