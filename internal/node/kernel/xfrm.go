package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// XfrmDir is the direction of an IPsec policy.
type XfrmDir uint8

// The directions of linux/xfrm.h.
const (
	XfrmIn      XfrmDir = 0 // to this machine
	XfrmOut     XfrmDir = 1 // from this machine, and forwarded packets that leave it
	XfrmForward XfrmDir = 2 // forwarded packets, on arrival
)

// XfrmPolicy is the selector of an IPsec policy. It omits ports, protocols and devices,
// so the policy may select less.
type XfrmPolicy struct {
	Dir      XfrmDir
	Src, Dst netip.Prefix
}

func (p XfrmPolicy) compare(q XfrmPolicy) int {
	return cmp.Or(cmp.Compare(p.Dir, q.Dir), comparePrefixes(p.Src, q.Src), comparePrefixes(p.Dst, q.Dst))
}

func comparePrefixes(p, q netip.Prefix) int {
	return cmp.Or(p.Addr().Compare(q.Addr()), cmp.Compare(p.Bits(), q.Bits()))
}

// XfrmPolicies lists the IPsec policies of the calling thread's network namespace that
// encrypt or block packets of every device, sorted and without duplicates. A kernel
// without IPsec has none. The list omits policies of single sockets, and policies that
// neither encrypt nor block. It also omits policies of xfrm interfaces, which apply only
// to packets routed to them.
func XfrmPolicies() ([]XfrmPolicy, error) {
	policies, err := Dump(listXfrm)
	if err == nil {
		var blocked []XfrmPolicy
		blocked, err = xfrmDefaults()
		policies = append(policies, blocked...)
	}
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list IPsec policies: %w", err)
	}
	slices.SortFunc(policies, XfrmPolicy.compare)
	return slices.Compact(policies), nil
}

func listXfrm() ([]XfrmPolicy, error) {
	req := nl.NewNetlinkRequest(int(nl.XFRM_MSG_GETPOLICY), unix.NLM_F_DUMP)
	msgs, err := req.Execute(unix.NETLINK_XFRM, uint16(nl.XFRM_MSG_NEWPOLICY))
	if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) {
		return nil, err
	}
	var policies []XfrmPolicy
	for _, m := range msgs {
		p, applies, err := parseXfrm(m)
		if err != nil {
			return nil, err
		}
		if applies {
			policies = append(policies, p)
		}
	}
	return policies, err
}

// parseXfrm parses struct xfrm_userpolicy_info and its attributes.
func parseXfrm(msg []byte) (p XfrmPolicy, applies bool, err error) {
	if len(msg) < nl.SizeofXfrmUserpolicyInfo {
		return p, false, fmt.Errorf("a policy of %d bytes", len(msg))
	}
	info := nl.DeserializeXfrmUserpolicyInfo(msg)
	if info.Dir > uint8(XfrmForward) {
		return p, false, nil // of a socket
	}
	attrs, err := nl.ParseRouteAttr(msg[nl.SizeofXfrmUserpolicyInfo:])
	if err != nil {
		return p, false, err
	}
	const block = 1 // XFRM_POLICY_BLOCK
	applies = info.Action == block
	for _, a := range attrs {
		switch int(a.Attr.Type) {
		case nl.XFRMA_TMPL:
			applies = true
		case nl.XFRMA_IF_ID:
			if len(a.Value) >= 4 && nl.NativeEndian().Uint32(a.Value) != 0 {
				return p, false, nil
			}
		}
	}
	sel := &info.Sel
	p.Dir = XfrmDir(info.Dir)
	p.Src, err = xfrmPrefix(sel.Family, sel.Saddr, sel.PrefixlenS)
	if err == nil {
		p.Dst, err = xfrmPrefix(sel.Family, sel.Daddr, sel.PrefixlenD)
	}
	return p, applies, err
}

func xfrmPrefix(family uint16, addr nl.XfrmAddress, bits uint8) (netip.Prefix, error) {
	a := netip.AddrFrom16(addr)
	if family == unix.AF_INET {
		a = netip.AddrFrom4([4]byte(addr[:4]))
	}
	p, err := a.Prefix(int(bits))
	if err != nil {
		return p, fmt.Errorf("a policy for family %d, %s/%d: %w", family, a, bits, err)
	}
	return p, nil
}

// xfrmDefaults returns the directions in which the kernel blocks packets that match no policy
// (ip xfrm policy setdefault, Linux 5.15).
func xfrmDefaults() (blocked []XfrmPolicy, err error) {
	const (
		getDefault = 0x28 // XFRM_MSG_GETDEFAULT
		block      = 1    // XFRM_USERPOLICY_BLOCK
	)
	req := nl.NewNetlinkRequest(getDefault, 0)
	req.AddRawData(make([]byte, 4)) // struct xfrm_userpolicy_default
	msgs, err := req.Execute(unix.NETLINK_XFRM, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil, nil // an older kernel
	}
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		for i, dir := range []XfrmDir{XfrmIn, XfrmForward, XfrmOut} {
			if i < len(m) && m[i] == block {
				for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
					every := netip.PrefixFrom(all, 0)
					blocked = append(blocked, XfrmPolicy{Dir: dir, Src: every, Dst: every})
				}
			}
		}
	}
	return blocked, nil
}

// XfrmWatch watches the IPsec policies of one network namespace.
type XfrmWatch struct {
	sub  *Subscription
	ns   netns.NsHandle
	stop chan struct{}
	done sync.WaitGroup
	once sync.Once
}

// WatchXfrm calls changed with the XfrmPolicies of the calling thread's network namespace
// before it returns. It calls it with each later list, one call at a time, until Close.
// failed is called with each error of reading the list, which is tried again.
func WatchXfrm(changed func([]XfrmPolicy), failed func(error)) (*XfrmWatch, error) {
	sub, err := subscribe(unix.NETLINK_XFRM, "xfrm", false, nl.XFRMNLGRP_POLICY, nl.XFRMNLGRP_EXPIRE)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		changed(nil)
		return &XfrmWatch{stop: make(chan struct{}), ns: netns.None()}, nil // a kernel without IPsec
	}
	if err != nil {
		return nil, fmt.Errorf("watch IPsec policies: %w", err)
	}
	return followXfrm(sub, changed, failed)
}

func followXfrm(sub *Subscription, changed func([]XfrmPolicy), failed func(error)) (*XfrmWatch, error) {
	ns, err := netns.Get()
	if err != nil {
		sub.Close()
		return nil, fmt.Errorf("watch IPsec policies: open own network namespace: %w", err)
	}
	w := &XfrmWatch{sub: sub, ns: ns, stop: make(chan struct{})}
	dirty := make(chan struct{}, 1)
	w.done.Go(func() { markDirtyOnNotification(sub, dirty) })
	last, err := XfrmPolicies()
	if err != nil {
		failed(err)
		dirty <- struct{}{}
	} else {
		changed(last)
	}
	w.done.Go(func() { w.run(dirty, last, changed, failed) })
	return w, nil
}

// xfrmPause is the shortest pause between two readings. Reading uses at most 10 % of wall
// time.
const xfrmPause = 50 * time.Millisecond

func (w *XfrmWatch) run(dirty chan struct{}, last []XfrmPolicy, changed func([]XfrmPolicy), failed func(error)) {
	for {
		select {
		case <-w.stop:
			return
		case <-dirty:
		}
		start := time.Now()
		var now []XfrmPolicy
		err := Do(w.ns, func() (err error) { now, err = XfrmPolicies(); return err })
		pause := max(xfrmPause, 10*time.Since(start))
		switch {
		case err != nil:
			failed(err)
			pause = max(pause, time.Second)
			select {
			case dirty <- struct{}{}:
			default:
			}
		case !slices.Equal(now, last):
			last = now
			changed(now)
		}
		select {
		case <-w.stop:
			return
		case <-time.After(pause):
		}
	}
}

// Close ends the watch. After it returns, changed is no longer called.
func (w *XfrmWatch) Close() error {
	var err error
	w.once.Do(func() {
		close(w.stop)
		if w.sub == nil {
			return
		}
		err = w.sub.Close()
		w.done.Wait()
		err = errors.Join(err, w.ns.Close())
	})
	return err
}
