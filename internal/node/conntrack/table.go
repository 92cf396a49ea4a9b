package conntrack

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Filter selects entries of a dump. The kernel applies it and copies only matching
// entries: the status since Linux 5.15, the rest since 5.8. For older kernels Dump
// filters again.
type Filter struct {
	Family   uint8          // AF_INET or AF_INET6; 0: any, or that of OrigDst
	Protocol uint8          // IPPROTO_*; 0: any
	Status   Status         // bits that must be set
	Unset    Status         // bits that must not be set; only with Status
	OrigDst  netip.AddrPort // destination of the original direction, of a Protocol that is not 0; the zero value: any
}

// Validate reports a missing value.
func (f Filter) Validate() error {
	if f.OrigDst.IsValid() && f.Protocol == 0 {
		return errors.New("conntrack filter: a port without a protocol")
	}
	if f.Unset != 0 && (f.Status == 0 || f.Status&f.Unset != 0) {
		return errors.New("conntrack filter: the bits of Unset need others in Status")
	}
	return nil
}

func (f Filter) passes(e *Entry) bool {
	return (f.Family == 0 || f.Family == familyOf(e.Orig.Src.Addr())) && (f.Protocol == 0 || e.Protocol == f.Protocol) &&
		e.Status&(f.Status|f.Unset) == f.Status &&
		(!f.OrigDst.IsValid() || e.Orig.Dst == f.OrigDst)
}

// Bits of CTA_FILTER_ORIG_FLAGS: which parts of CTA_TUPLE_ORIG must match
// (net/netfilter/nf_internals.h).
const (
	ctaFilterOrigFlags, ctaFilterReplyFlags = 1, 2

	filterIPDst   = 1 << 1
	filterProto   = 1 << 3
	filterDstPort = 1 << 5
)

// attrs returns the filter attributes of a dump of one family.
func (f Filter) attrs(family uint8) []*nl.RtAttr {
	var out []*nl.RtAttr
	if f.Status != 0 {
		out = append(out, nl.NewRtAttr(ctaStatus, nl.BEUint32Attr(uint32(f.Status))),
			nl.NewRtAttr(ctaStatusMask, nl.BEUint32Attr(uint32(f.Status|f.Unset))))
	}
	if f.Protocol == 0 {
		return out
	}
	any := netip.IPv4Unspecified()
	if family == unix.AF_INET6 {
		any = netip.IPv6Unspecified()
	}
	tuple := Tuple{Src: netip.AddrPortFrom(any, 0), Dst: netip.AddrPortFrom(any, 0)}
	var flags uint32 = filterProto
	if f.OrigDst.IsValid() {
		flags |= filterDstPort
		tuple.Dst = f.OrigDst
		// ctnetlink_filter_match_tuple inverts the comparison of IPv6 addresses (seen on
		// 6.18): it would omit the matching entries.
		if family == unix.AF_INET {
			flags |= filterIPDst
		}
	}
	filter := nl.NewRtAttr(unix.NLA_F_NESTED|ctaFilter, nil)
	filter.AddRtAttr(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags))
	filter.AddRtAttr(ctaFilterReplyFlags, binary.NativeEndian.AppendUint32(nil, 0))
	return append(out, encodeTuple(ctaTupleOrig, tuple, f.Protocol), filter)
}

// families returns the families to dump: with CTA_FILTER the kernel accepts one at a time.
func (f Filter) families() []uint8 {
	switch {
	case f.Family != 0:
		return []uint8{f.Family}
	case f.Protocol == 0:
		return []uint8{unix.AF_UNSPEC}
	case !f.OrigDst.IsValid():
		return []uint8{unix.AF_INET, unix.AF_INET6}
	}
	return []uint8{familyOf(f.OrigDst.Addr())}
}

func familyOf(a netip.Addr) uint8 {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// Dump calls each with every entry that matches the filter. The next call overwrites the
// Entry. each may call Delete; it ends the dump by returning false. If the kernel
// interrupts a dump, Dump restarts it, so an entry may come twice. Entries created
// meanwhile may be missing.
func (c *Conn) Dump(ctx context.Context, f Filter, each func(*Entry) bool) error {
	if err := f.Validate(); err != nil {
		return err
	}
	var e Entry
	going := true
	for _, family := range f.families() {
		err := dumpAgain(ctx, func() error {
			return c.dumpAll(unix.NFNL_SUBSYS_CTNETLINK, msgGet, family, f.attrs(family), func(b []byte) bool {
				if decodeEntry(b, &e); f.passes(&e) {
					going = each(&e)
				}
				return going && ctx.Err() == nil
			})
		})
		if !going {
			return nil
		}
		if err = cmp.Or(err, ctx.Err()); err != nil {
			return fmt.Errorf("dump conntrack entries: %w", err)
		}
	}
	return nil
}

// Add adds an entry without NAT, with the tuples, the protocol, the status, the timeout and, for
// TCP, the state of e. It reports false if there is an entry with one of the tuples: that stays as
// it is. A full table evicts an entry that is not Assured for it (early_drop).
func (c *Conn) Add(e *Entry) (added bool, err error) {
	req := c.request(unix.NFNL_SUBSYS_CTNETLINK, msgNew, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL, familyOf(e.Orig.Src.Addr()))
	req.AddData(encodeTuple(ctaTupleOrig, e.Orig, e.Protocol))
	req.AddData(encodeTuple(ctaTupleReply, e.Reply, e.Protocol))
	// The kernel takes a status that lacks Confirmed for the wish to clear it (EBUSY).
	req.AddData(nl.NewRtAttr(ctaStatus, nl.BEUint32Attr(uint32(e.Status|Confirmed))))
	req.AddData(nl.NewRtAttr(ctaTimeout, nl.BEUint32Attr(uint32(e.Timeout/time.Second))))
	if e.Protocol == unix.IPPROTO_TCP {
		info := nl.NewRtAttr(unix.NLA_F_NESTED|ctaProtoInfo, nil)
		info.AddRtAttr(unix.NLA_F_NESTED|ctaProtoInfoTCP, nil).AddRtAttr(ctaProtoInfoTCPState, nl.Uint8Attr(e.TCPState))
		req.AddData(info)
	}
	_, err = req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return false, fmt.Errorf("add conntrack entry %s: %w", e, meaning(err))
	}
	return err == nil, nil
}

// Delete deletes this entry, but not a later entry with the same original tuple: it
// identifies the entry by its reply tuple and its ID. The ID alone is not enough. The
// kernel derives it from the entry's address in memory and its original tuple
// (nf_ct_get_id), and the slab reuses addresses. A missing entry is no error.
func (c *Conn) Delete(e *Entry) error {
	req := c.request(unix.NFNL_SUBSYS_CTNETLINK, msgDelete, unix.NLM_F_ACK, familyOf(e.Reply.Src.Addr()))
	req.AddData(encodeTuple(ctaTupleReply, e.Reply, e.Protocol))
	req.AddData(nl.NewRtAttr(ctaID, nl.BEUint32Attr(e.ID)))
	if e.Zone != 0 {
		req.AddData(nl.NewRtAttr(ctaZone, nl.BEUint16Attr(e.Zone)))
	}
	_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete conntrack entry %s: %w", e, meaning(err))
	}
	return nil
}
