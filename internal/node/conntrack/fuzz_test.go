package conntrack

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// FuzzDecodeEntry decodes messages of a dump of conntrack: whole, truncated, and with
// wrong lengths. The decoder must read all readable attributes, and keep nothing of the
// previous message.
func FuzzDecodeEntry(f *testing.F) {
	header := make([]byte, nl.SizeofNfgenmsg)
	for _, t := range []Tuple{
		{Src: netip.MustParseAddrPort("10.0.0.1:1234"), Dst: netip.MustParseAddrPort("10.96.0.1:80"), Zone: 7},
		{Src: netip.MustParseAddrPort("[fd00::1]:1234"), Dst: netip.MustParseAddrPort("[fd00::2]:53")},
	} {
		whole := append(append([]byte{}, header...), encodeTuple(ctaTupleOrig, t, unix.IPPROTO_TCP).Serialize()...)
		whole = append(whole, encodeTuple(ctaTupleReply, t, unix.IPPROTO_TCP).Serialize()...)
		for _, a := range []*nl.RtAttr{
			nl.NewRtAttr(ctaStatus, nl.BEUint32Attr(uint32(Assured|SeenReply))), nl.NewRtAttr(ctaTimeout, nl.BEUint32Attr(120)),
			nl.NewRtAttr(ctaHelp|unix.NLA_F_NESTED, nl.NewRtAttr(ctaHelpName, nl.ZeroTerminated("tftp")).Serialize()),
			nl.NewRtAttr(ctaProtoInfo|unix.NLA_F_NESTED, nl.NewRtAttr(ctaProtoInfoTCP|unix.NLA_F_NESTED,
				nl.NewRtAttr(ctaProtoInfoTCPState, []byte{3}).Serialize()).Serialize()),
		} {
			whole = append(whole, a.Serialize()...)
		}
		f.Add(whole)
		f.Add(whole[:len(whole)-3])
		f.Add(whole[:30])
	}
	f.Add([]byte{})
	f.Add(append(append([]byte{}, header...), 0xff, 0xff, 1, 0, 0, 0, 1, 0))
	f.Fuzz(func(t *testing.T, message []byte) {
		e := Entry{Helper: "before", Status: Dying, Zone: 9}
		decodeEntry(message, &e)
		var again Entry
		decodeEntry(message, &again)
		if e != again {
			t.Errorf("%+v, and read into an empty one %+v", e, again)
		}
		if len(message) <= nl.SizeofNfgenmsg && e != (Entry{}) {
			t.Errorf("nothing is read as %+v", e)
		}
	})
}

// FuzzLogLine reads records of the kernel's log, which programs can write to.
func FuzzLogLine(f *testing.F) {
	for _, s := range []string{"4,1,123,-;nf_conntrack: nf_conntrack: table full, dropping packet", "12,1,1,-;nf_conntrack: table full",
		"4,1;nf_conntrack", ";", "4,1,99999999999999999999,-;nf_conntrack table full",
		"4,1,1,-;nf_conntrack: expectation table full\n SUBSYSTEM=x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, record string) {
		if l, ok := parseLogLine(record); ok && (l.Kind != TableFull && l.Kind != ExpectTableFull || len(l.Text) > len(record)) {
			t.Errorf("%+v", l)
		}
	})
}
