package kernel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

var nativeEndian = nl.NativeEndian()

const addrsCoalesce = 50 * time.Millisecond

// proxyDevices are devices to which another proxy gives the addresses of all Services: kube-proxy in
// mode ipvs, and kube-router. They are not the node's own addresses, and remain after the proxy
// has ended.
var proxyDevices = []string{"kube-ipvs0", "kube-dummy-if"}

// Addrs lists the addresses of the calling thread's network namespace, sorted and without
// duplicates. It omits loopback and link-local addresses, addresses that duplicate
// address detection has not cleared, and those of Services on the device of another proxy.
func Addrs() ([]netip.Addr, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	defer h.Close()
	addrs, _, err := ownAddrs(h, false)
	return addrs, err
}

// passing are the flags of addresses that new connections should not have: temporary ones (RFC 8981), and those that
// are not checked for duplicates yet.
const passing = unix.IFA_F_TEMPORARY | unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED

// WatchAddrs calls f with Addrs at once, from the calling goroutine, and then from
// another goroutine each time the list changes, until ctx ends. Changes within 50 ms
// make one call. If the list cannot be read, WatchAddrs retries after a second.
func WatchAddrs(ctx context.Context, f func([]netip.Addr)) error {
	return watchAddrs(ctx, false, func(addrs, _ []netip.Addr) { f(addrs) })
}

// WatchLastingAddrs is WatchAddrs without temporary and unchecked addresses. f receives apart those whose preferred
// lifetime is over (RFC 4862, 5.5.4).
func WatchLastingAddrs(ctx context.Context, f func(lasting, deprecated []netip.Addr)) error {
	return watchAddrs(ctx, true, f)
}

// watchAddrs is WatchAddrs, or WatchLastingAddrs if lasting is true.
func watchAddrs(ctx context.Context, lasting bool, f func(addrs, deprecated []netip.Addr)) error {
	sub, err := Subscribe(false, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_LINK)
	if err != nil {
		return fmt.Errorf("watch addresses: %w", err)
	}
	h, err := netlink.NewHandleAt(netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		sub.Close()
		return fmt.Errorf("watch addresses: %w", err)
	}
	addrs, deprecated, err := ownAddrs(h, lasting)
	if err != nil {
		sub.Close()
		h.Close()
		return err
	}
	f(addrs, deprecated)
	dirty := make(chan struct{}, 1)
	go markDirtyOnNotification(sub, dirty)
	go func() {
		defer h.Close()
		defer sub.Close()
		followAddrs(ctx, dirty, func() (err error) {
			nowAddrs, nowDeprecated, err := ownAddrs(h, lasting)
			if err == nil && !(slices.Equal(nowAddrs, addrs) && slices.Equal(nowDeprecated, deprecated)) {
				addrs, deprecated = nowAddrs, nowDeprecated
				f(addrs, deprecated)
			}
			return err
		})
	}()
	return nil
}

// markDirtyOnNotification fills dirty whenever notifications arrive or are lost, until sub is closed.
func markDirtyOnNotification(sub *Subscription, dirty chan<- struct{}) {
	for {
		_, err := sub.Receive()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil && !errors.Is(err, ErrOverrun) {
			time.Sleep(time.Second) // unexpected; do not spin
		}
		select {
		case dirty <- struct{}{}:
		default:
		}
	}
}

// followAddrs calls read when dirty is filled, and again after a second if it fails, until ctx ends.
func followAddrs(ctx context.Context, dirty chan struct{}, read func() error) {
	for {
		wait := addrsCoalesce
		select {
		case <-ctx.Done():
			return
		case <-dirty:
		}
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
			select {
			case <-dirty: // covered by the next reading
			default:
			}
			if read() == nil {
				break
			}
			wait = time.Second
		}
	}
}

// ownAddrs returns what Addrs does. If lasting is true, it leaves out addresses with a flag of passing, and returns
// deprecated ones apart.
func ownAddrs(h *netlink.Handle, lasting bool) (addrs, deprecated []netip.Addr, err error) {
	list, err := Dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, nil, fmt.Errorf("list addresses: %w", err)
	}
	others := map[int]bool{}
	for _, name := range proxyDevices {
		if link, err := h.LinkByName(name); err == nil {
			others[link.Attrs().Index] = true
		}
	}
	for _, a := range list {
		flags := a.Flags
		if a.IP.To4() != nil {
			flags &^= unix.IFA_F_SECONDARY // the same bit as IFA_F_TEMPORARY
		}
		if others[a.LinkIndex] || lasting && flags&passing != 0 {
			continue
		}
		if a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0 {
			continue
		}
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		ip = ip.Unmap()
		if ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() || ip.IsUnspecified() {
			continue
		}
		if lasting && flags&unix.IFA_F_DEPRECATED != 0 {
			deprecated = append(deprecated, ip)
		} else {
			addrs = append(addrs, ip)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	slices.SortFunc(deprecated, netip.Addr.Compare)
	return slices.Compact(addrs), slices.Compact(deprecated), nil
}
