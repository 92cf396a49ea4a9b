package attach

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzParseAddr reads messages of a dump of addresses, whole, cut short and lying about
// their length. Only a global address of the interface that was asked for is taken.
func FuzzParseAddr(f *testing.F) {
	const nsid, ifindex = 7, 3
	attribute := func(kind uint16, value ...byte) []byte {
		b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
		b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
		for len(b)%4 != 0 {
			b = append(b, 0)
		}
		return b
	}
	message := func(family byte, attributes ...[]byte) []byte {
		b := []byte{family, 24, 0, unix.RT_SCOPE_UNIVERSE}
		b = binary.NativeEndian.AppendUint32(b, ifindex)
		for _, a := range attributes {
			b = append(b, a...)
		}
		return b
	}
	own := attribute(unix.IFA_TARGET_NETNSID, 7, 0, 0, 0)
	whole := message(unix.AF_INET, own, attribute(unix.IFA_LOCAL, 10, 0, 0, 1), attribute(unix.IFA_FLAGS, 128, 0, 0, 0))
	for _, m := range [][]byte{
		whole, whole[:len(whole)-2], whole[:6], {}, message(unix.AF_INET6, own, attribute(unix.IFA_ADDRESS, append(make([]byte, 15), 1)...)),
		message(unix.AF_INET, own, attribute(unix.IFA_LOCAL, 10)), message(unix.AF_INET, attribute(unix.IFA_TARGET_NETNSID, 7)),
		message(unix.AF_INET, own, attribute(unix.IFA_FLAGS)),
		message(unix.AF_INET, own, []byte{0xff, 0xff, 2, 0}), message(unix.AF_INET, own, []byte{0, 0, 0, 0}),
	} {
		f.Add(m)
	}
	if a, ok := parseAddr(whole, nsid, ifindex); !ok || a.addr != netip.MustParseAddr("10.0.0.1") {
		f.Errorf("%v, %v", a, ok)
	}
	f.Fuzz(func(t *testing.T, m []byte) {
		if a, ok := parseAddr(m, nsid, ifindex); ok && (!a.addr.IsGlobalUnicast() || a.addr.Is4In6()) {
			t.Errorf("%v", a)
		}
		if a, ok := parseAddr(m, nsid, ifindex+1); ok && binary.NativeEndian.Uint32(m[4:]) == ifindex {
			t.Errorf("%v of another interface", a)
		}
	})
}
