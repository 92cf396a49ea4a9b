package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// NftablesWatch tells when tables of nf_tables are changed: with nft, by another
// proxy, or by iptables where that is the nft variant.
type NftablesWatch struct {
	sub  *Subscription
	done chan struct{}
}

// WatchNftables watches the tables of the calling thread's network namespace of
// which ours says so, by family (unix.NFPROTO_*) and name. changed is called, by a
// goroutine of the watch's own, after changes; several may make one call. What was
// lost because it came too fast counts as a change.
func WatchNftables(ours func(family uint8, table string) bool, changed func()) (*NftablesWatch, error) {
	sub, err := subscribe(unix.NETLINK_NETFILTER, "nfnetlink", false, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, err
	}
	w := &NftablesWatch{sub: sub, done: make(chan struct{})}
	go w.run(ours, changed)
	return w, nil
}

func (w *NftablesWatch) run(ours func(uint8, string) bool, changed func()) {
	defer close(w.done)
	for {
		news, err := w.sub.Receive()
		if err != nil && !errors.Is(err, ErrOverrun) {
			return // closed
		}
		touched := err != nil
		for _, n := range news {
			family, table := nftablesObject(n)
			touched = touched || table != "" && ours(family, table)
		}
		if touched {
			changed()
		}
	}
}

// nftablesObject says in which table the object of a message is. Its attribute is
// the first of every kind of object but the generation.
func nftablesObject(n News) (family uint8, table string) {
	const tableAttr = 1 // NFTA_TABLE_NAME, NFTA_CHAIN_TABLE, NFTA_RULE_TABLE ...
	if n.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || n.Type&0xff == unix.NFT_MSG_NEWGEN || len(n.Data) < 4 {
		return 0, ""
	}
	for b := n.Data[4:]; len(b) >= 4; {
		size := int(binary.NativeEndian.Uint16(b))
		if size < 4 || size > len(b) {
			break
		}
		if binary.NativeEndian.Uint16(b[2:]) == tableAttr {
			table, _, _ = strings.Cut(string(b[4:size]), "\x00")
			return n.Data[0], table
		}
		b = b[min(len(b), (size+3)&^3):]
	}
	return 0, ""
}

// Ignore has the kernel leave out what the socket with this netlink port
// changes: a proxy's own writes are far more than anybody else's.
func (w *NftablesWatch) Ignore(port uint32) error {
	// Classic BPF loads in network order; the header is in the host's.
	var order [4]byte
	binary.NativeEndian.PutUint32(order[:], port)
	const nlmsgPid = 12 // in struct nlmsghdr
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nlmsgPid},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: binary.BigEndian.Uint32(order[:])},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 31},
	}
	raw, err := w.sub.file.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	err = raw.Control(func(fd uintptr) {
		opt = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	})
	if err = errors.Join(err, opt); err != nil {
		return fmt.Errorf("leave own changes out of nf_tables' news: %w", err)
	}
	return nil
}

// Close ends the watch.
func (w *NftablesWatch) Close() error {
	err := w.sub.Close()
	<-w.done
	return err
}
