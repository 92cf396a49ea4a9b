package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// NftablesWatch watches changes of nf_tables tables: by nft, by another proxy, or by the
// nft variant of iptables.
type NftablesWatch struct {
	sub  *Subscription
	done chan struct{}
}

// WatchNftables watches the tables of the calling thread's network namespace for which
// ours(family, name) is true; family is a unix.NFPROTO_*. It calls changed from its own
// goroutine after changes; one call may cover several. Lost notifications count as a
// change.
func WatchNftables(ours func(family uint8, table string) bool, changed func()) (*NftablesWatch, error) {
	return FollowNftables(func(news []News, lost bool) {
		touched := lost
		for _, n := range news {
			family, table := nftablesObject(n)
			touched = touched || table != "" && ours(family, table)
		}
		if touched {
			changed()
		}
	})
}

// FollowNftables calls onUpdate with each notification of nf_tables in the calling
// thread's network namespace, from its own goroutine. The kernel sends notifications
// after the commit. lost reports that notifications were lost. The notifications are
// valid until onUpdate returns.
func FollowNftables(onUpdate func(news []News, lost bool)) (*NftablesWatch, error) {
	sub, err := subscribe(unix.NETLINK_NETFILTER, "nfnetlink", false, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, err
	}
	w := &NftablesWatch{sub: sub, done: make(chan struct{})}
	go w.run(onUpdate)
	return w, nil
}

func (w *NftablesWatch) run(onUpdate func([]News, bool)) {
	defer close(w.done)
	for {
		news, err := w.sub.Receive()
		if err != nil && !errors.Is(err, ErrOverrun) {
			return // closed
		}
		onUpdate(news, err != nil)
	}
}

// IsNftables reports whether the message is of nf_tables, and returns its type
// (unix.NFT_MSG_*).
func (n News) IsNftables() (message uint16, ok bool) {
	return n.Type & 0xff, n.Type>>8 == unix.NFNL_SUBSYS_NFTABLES
}

// EachNftRule calls f with each rule of nf_tables in the calling thread's network
// namespace, of all families, until f returns false. The argument of f is the payload of
// an NFT_MSG_NEWRULE message, as in notifications of FollowNftables. A kernel without
// nf_tables has no rules. The error nl.ErrDumpInterrupted says that rules changed during
// the dump and some may be missing.
func EachNftRule(f func(rule []byte) bool) error {
	s, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list rules of nf_tables: %w", err)
	}
	defer s.Close() // ends a dump that f stopped
	if err := s.SetReceiveTimeout(&unix.Timeval{Sec: 10}); err != nil {
		return fmt.Errorf("list rules of nf_tables: %w", err)
	}
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	if err := s.Send(req); err != nil {
		return fmt.Errorf("list rules of nf_tables: %w", err)
	}
	for interrupted := false; ; {
		msgs, _, err := s.Receive()
		if err != nil {
			return fmt.Errorf("list rules of nf_tables: %w", err)
		}
		for _, m := range msgs {
			interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case m.Header.Type == unix.NLMSG_ERROR || m.Header.Type == unix.NLMSG_DONE:
				if err := nftDumpError(m.Data); err != nil || !interrupted {
					return err
				}
				return nl.ErrDumpInterrupted
			case m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWRULE && !f(m.Data):
				return nil
			}
		}
	}
}

// nftDumpError returns the result of a dump.
func nftDumpError(data []byte) error {
	if len(data) < 4 {
		return nil
	}
	switch errno := unix.Errno(-int32(binary.NativeEndian.Uint32(data))); errno {
	case 0, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EINVAL: // the last three: no nf_tables
		return nil
	default:
		return fmt.Errorf("list rules of nf_tables: %w", errno)
	}
}

// nftablesObject returns the table of a message's object. The table is the first
// attribute of every kind of object except the generation.
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

// Ignore makes the kernel omit notifications about changes by the socket with this
// netlink port: a proxy's own writes far outnumber all other changes.
func (w *NftablesWatch) Ignore(port uint32) error {
	// Classic BPF loads in network byte order; the header is in host byte order.
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
		return fmt.Errorf("ignore own nf_tables notifications: %w", err)
	}
	return nil
}

// Close ends the watch.
func (w *NftablesWatch) Close() error {
	err := w.sub.Close()
	<-w.done
	return err
}
