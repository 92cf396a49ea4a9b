package nftables

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// batch is a list of changes that the kernel makes all at once or not at all.
type batch struct {
	table string
	about string // the table's comment, if it is not that of Services
	msgs  []netlink.Message
	size  int
	// loose is how many of the messages may be carried out before the others, a
	// part at a time: no rule uses yet what they make.
	loose int
}

// partSize bounds the parts of a batch of loose messages, in bytes. The kernel keeps some
// hundred bytes for each element until the batch ends, and 4 KiB if any program in any
// namespace listens to nf_tables: a notification (nf_tables_setelem_notify). 50,000
// Services in one batch made that 2 GiB.
const partSize = 1 << 20

// parts are the batch in the batches that it is sent in.
func (b *batch) parts() (out []*batch) {
	part := &batch{table: b.table}
	for i, m := range b.msgs {
		if i < b.loose && part.size >= partSize {
			out, part = append(out, part), &batch{table: b.table}
		}
		part.append(int(m.Header.Type)&0xff, m.Header.Flags&^netlink.Request, m.Data)
	}
	return append(out, part)
}

// loosen lets the messages before the first rule be carried out in parts.
func (b *batch) loosen() {
	isRule := func(m netlink.Message) bool { return int(m.Header.Type)&0xff == unix.NFT_MSG_NEWRULE }
	b.loose = max(0, slices.IndexFunc(b.msgs, isRule))
}

// message appends a message; fill writes its attributes.
func (b *batch) message(typ int, flags netlink.HeaderFlags, fill func(a *attrs)) {
	a := attrs{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	fill(&a)
	b.append(typ, flags, a)
}

func (b *batch) append(typ int, flags netlink.HeaderFlags, data attrs) {
	b.msgs = append(b.msgs, netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Flags: netlink.Request | flags},
		Data:   data,
	})
	b.size += unix.NLMSG_HDRLEN + len(data)
}

const (
	nftaTableUserdata = 6
	nftaChainUserdata = 12
	udataTableComment = 0
	udataChainComment = 0
)

func (b *batch) addTable() {
	b.message(unix.NFT_MSG_NEWTABLE, netlink.Create, func(a *attrs) {
		a.str(unix.NFTA_TABLE_NAME, b.table)
		a.u32(unix.NFTA_TABLE_FLAGS, 0)
		var u udata
		u.str(udataTableComment, cmp.Or(b.about, "Kubernetes Services, kept by spillway: changes made by hand are undone"))
		a.bytes(nftaTableUserdata, u)
	})
}

func (b *batch) delTable() {
	b.message(unix.NFT_MSG_DELTABLE, 0, func(a *attrs) { a.str(unix.NFTA_TABLE_NAME, b.table) })
}

func (b *batch) addSet(s *set) {
	b.message(unix.NFT_MSG_NEWSET, netlink.Create, func(a *attrs) {
		a.str(unix.NFTA_SET_TABLE, b.table)
		a.str(unix.NFTA_SET_NAME, s.name)
		a.u32(unix.NFTA_SET_FLAGS, s.flags())
		a.u32(unix.NFTA_SET_KEY_TYPE, typeOf(s.key))
		a.u32(unix.NFTA_SET_KEY_LEN, sizeOf(s.key))
		if s.verdict {
			a.u32(unix.NFTA_SET_DATA_TYPE, nftDataVerdict)
		} else if s.isMap() {
			a.u32(unix.NFTA_SET_DATA_TYPE, typeOf(s.data))
			a.u32(unix.NFTA_SET_DATA_LEN, sizeOf(s.data))
		}
		a.u32(unix.NFTA_SET_ID, uint32(len(b.msgs)+1))
		if s.flags()&nftSetConcat != 0 {
			desc := a.nest(unix.NFTA_SET_DESC)
			concat := a.nest(setDescConcat)
			for _, f := range s.key {
				elem := a.nest(unix.NFTA_LIST_ELEM)
				a.u32(setFieldLen, f.size)
				a.close(elem)
			}
			a.close(concat)
			a.close(desc)
		}
		if s.dynamic() {
			desc := a.nest(unix.NFTA_SET_DESC)
			a.u32(unix.NFTA_SET_DESC_SIZE, s.size)
			a.close(desc)
		}
		a.bytes(unix.NFTA_SET_USERDATA, s.userData())
		if s.counted {
			expr := a.nest(setExpr)
			a.str(unix.NFTA_EXPR_NAME, "counter")
			a.close(a.nest(unix.NFTA_EXPR_DATA))
			a.close(expr)
		}
	})
}

const nftDataVerdict = 0xffffff00 // NFT_DATA_VERDICT

func (b *batch) delSet(name string) {
	b.message(unix.NFT_MSG_DELSET, 0, func(a *attrs) {
		a.str(unix.NFTA_SET_TABLE, b.table)
		a.str(unix.NFTA_SET_NAME, name)
	})
}

func (b *batch) addChain(c *chain) {
	b.message(unix.NFT_MSG_NEWCHAIN, netlink.Create, func(a *attrs) {
		a.str(unix.NFTA_CHAIN_TABLE, b.table)
		a.str(unix.NFTA_CHAIN_NAME, c.name)
		if c.hook != nil {
			at := a.nest(unix.NFTA_CHAIN_HOOK)
			a.u32(unix.NFTA_HOOK_HOOKNUM, c.hook.num)
			a.u32(unix.NFTA_HOOK_PRIORITY, uint32(c.hook.priority))
			a.close(at)
			a.str(unix.NFTA_CHAIN_TYPE, c.hook.typ)
			a.u32(unix.NFTA_CHAIN_POLICY, nfAccept)
		}
		if c.comment != "" {
			var u udata
			u.str(udataChainComment, c.comment)
			a.bytes(nftaChainUserdata, u)
		}
	})
}

const nfAccept = 1

func (b *batch) delChain(name string) {
	b.message(unix.NFT_MSG_DELCHAIN, 0, func(a *attrs) {
		a.str(unix.NFTA_CHAIN_TABLE, b.table)
		a.str(unix.NFTA_CHAIN_NAME, name)
	})
}

// flushChain takes all rules out of a chain.
func (b *batch) flushChain(name string) {
	b.message(unix.NFT_MSG_DELRULE, 0, func(a *attrs) {
		a.str(unix.NFTA_RULE_TABLE, b.table)
		a.str(unix.NFTA_RULE_CHAIN, name)
	})
}

func (b *batch) addRules(c *chain) {
	for _, r := range c.rules {
		b.message(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, func(a *attrs) {
			a.str(unix.NFTA_RULE_TABLE, b.table)
			a.str(unix.NFTA_RULE_CHAIN, c.name)
			a.bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.exprs)
			a.bytes(unix.NFTA_RULE_USERDATA, r.userData())
		})
	}
}

// flushSet takes all elements out of a set.
func (b *batch) flushSet(name string) {
	b.message(unix.NFT_MSG_DELSETELEM, 0, func(a *attrs) {
		a.str(unix.NFTA_SET_ELEM_LIST_TABLE, b.table)
		a.str(unix.NFTA_SET_ELEM_LIST_SET, name)
	})
}

// listLimit bounds a list of elements: the length of an attribute has 16 bits,
// and an element is far smaller than what is left.
const listLimit = 60_000

// elements adds elements to a set, or takes them out. next gives one at a time.
func (b *batch) elements(typ int, s *set, next func() (string, *value, bool)) {
	flags := netlink.HeaderFlags(0)
	if typ == unix.NFT_MSG_NEWSETELEM {
		flags = netlink.Create
	}
	key, v, more := next()
	for more {
		b.message(typ, flags, func(a *attrs) {
			a.str(unix.NFTA_SET_ELEM_LIST_TABLE, b.table)
			a.str(unix.NFTA_SET_ELEM_LIST_SET, s.name)
			list := a.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
			for more && len(*a) < listLimit {
				at := a.nest(unix.NFTA_LIST_ELEM)
				a.element(key, v, typ == unix.NFT_MSG_NEWSETELEM)
				a.close(at)
				key, v, more = next()
			}
			a.close(list)
		})
	}
}

func (a *attrs) element(key string, v *value, whole bool) {
	a.data(unix.NFTA_SET_ELEM_KEY, key)
	if v.end != "" {
		a.data(setElemKeyEnd, v.end)
	}
	if v.flags != 0 {
		a.u32(unix.NFTA_SET_ELEM_FLAGS, v.flags)
	}
	if !whole {
		return
	}
	if v.timeout > 0 {
		a.u64(unix.NFTA_SET_ELEM_TIMEOUT, uint64(v.timeout.Milliseconds()))
	}
	if v.data != "" {
		a.data(unix.NFTA_SET_ELEM_DATA, v.data)
	}
	if v.jump != "" {
		at := a.nest(unix.NFTA_SET_ELEM_DATA)
		a.verdict(unix.NFT_JUMP, v.jump)
		a.close(at)
	}
	if v.comment != "" {
		at := a.open(unix.NFTA_SET_ELEM_USERDATA)
		*a = append(*a, udataElemComment, byte(len(v.comment)+1))
		*a = append(append(*a, v.comment...), 0)
		a.close(at)
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

// messageBuffer is how much is received at once. The kernel hands out a dump in
// pieces of up to 32 KiB if the reader has room for them, and begins each piece
// by skipping all elements that went before: small pieces make it slow.
const messageBuffer = 128 << 10

// patience bounds how long the kernel may take for one batch or dump.
const patience = 2 * time.Minute

// socket is a netlink socket of the network namespace it was opened in.
type socket struct {
	conn *netlink.Conn
	sndb int
}

func dial() (*socket, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: messageBuffer})
	if err != nil {
		return nil, fmt.Errorf("open netlink socket to netfilter: %w", err)
	}
	// What the kernel complains of in words is worth having.
	_ = conn.SetOption(netlink.ExtendedAcknowledge, true)
	return &socket{conn: conn}, nil
}

// do runs f with a socket, a fresh one if there is none, and closes it after an
// error: answers to the failed request may still be under way.
func (b *Backend) do(ctx context.Context, f func(*socket) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.sock == nil {
		s, err := dial()
		if err != nil {
			return err
		}
		b.sock = s
		if b.watch != nil {
			_ = b.watch.Ignore(s.conn.PID()) // else it costs an audit
		}
	}
	if err := b.sock.conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return fmt.Errorf("set deadline of netlink socket: %w", err)
	}
	err := f(b.sock)
	if err != nil {
		b.sock.close()
		b.sock = nil
	}
	return err
}

func (s *socket) close() { _ = s.conn.Close() }

// commit sends a batch and waits until the kernel has made all its changes.
// Without end it makes none of them, but says what is wrong with one.
func (s *socket) commit(b *batch, end bool) error {
	if len(b.msgs) == 0 {
		return nil
	}
	if need := b.size + 1<<16; need > s.sndb {
		if err := s.conn.SetWriteBuffer(need); err != nil {
			return fmt.Errorf("make send buffer hold a batch of %d bytes: %w", b.size, err)
		}
		s.sndb = need
	}
	marker := func(typ netlink.HeaderType) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: typ, Flags: netlink.Request},
			Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
		}
	}
	msgs := append([]netlink.Message{marker(unix.NFNL_MSG_BATCH_BEGIN)}, b.msgs...)
	last := len(msgs) - 1
	// Errors come unasked. One answer says that the rest went well.
	msgs[last].Header.Flags |= netlink.Acknowledge
	if end {
		msgs = append(msgs, marker(unix.NFNL_MSG_BATCH_END))
	}
	sent, err := s.conn.SendMessages(msgs)
	if err != nil {
		return fmt.Errorf("send batch of %d bytes: %w", b.size, err)
	}
	want := sent[last].Header.Sequence
	for {
		answers, err := s.conn.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("change table: the kernel refused more changes than its answers had room for, so somebody else has changed the table: %w", err)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", blamed(err, sent), err)
		}
		for _, m := range answers {
			if m.Header.Type == netlink.Error && m.Header.Sequence == want {
				return nil
			}
		}
	}
}

// blamed says in words which message an error is about.
func blamed(err error, sent []netlink.Message) string {
	var op *netlink.OpError
	if !errors.As(err, &op) {
		return "change table"
	}
	i := slices.IndexFunc(sent, func(m netlink.Message) bool { return m.Header.Sequence == op.Sequence })
	if i <= 0 {
		return "change table"
	}
	object := ""
	for typ, v := range attributes(sent[i]) {
		if typ <= 2 { // NFTA_*_TABLE and NFTA_*_NAME, in one order or the other
			object += " " + cString(v)
		}
	}
	return verbs[int(sent[i].Header.Type)&0xff] + object
}

var verbs = map[int]string{
	unix.NFT_MSG_NEWTABLE: "add table", unix.NFT_MSG_DELTABLE: "delete table",
	unix.NFT_MSG_NEWSET: "add set", unix.NFT_MSG_DELSET: "delete set",
	unix.NFT_MSG_NEWCHAIN: "add chain", unix.NFT_MSG_DELCHAIN: "delete chain",
	unix.NFT_MSG_NEWRULE: "add rule to", unix.NFT_MSG_DELRULE: "flush chain",
	unix.NFT_MSG_NEWOBJ: "add ct helper", unix.NFT_MSG_DELOBJ: "delete ct helper",
	unix.NFT_MSG_NEWSETELEM: "add elements to", unix.NFT_MSG_DELSETELEM: "delete elements of",
}

// generation is the number of batches that all programs have committed.
func (s *socket) generation() (uint32, error) {
	answers, err := s.request(unix.NFT_MSG_GETGEN, 0, attrs{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0})
	if err != nil {
		return 0, fmt.Errorf("read generation of nf_tables: %w", err)
	}
	for _, m := range answers {
		for typ, v := range attributes(m) {
			if typ == unix.NFTA_GEN_ID && len(v) == 4 {
				return binary.BigEndian.Uint32(v), nil
			}
		}
	}
	return 0, errors.New("read generation of nf_tables: the kernel does not tell")
}

// request sends one message and returns the answers.
func (s *socket) request(typ int, flags netlink.HeaderFlags, data attrs) (answers []netlink.Message, err error) {
	err = s.each(typ, flags, data, func(m netlink.Message) { answers = append(answers, m) })
	return answers, err
}

// each sends one message and gives each answer to take. A dump that others
// disturbed comes to its end all the same.
func (s *socket) each(typ int, flags netlink.HeaderFlags, data attrs, take func(netlink.Message)) error {
	sent, err := s.conn.SendMessages([]netlink.Message{{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | typ), Flags: netlink.Request | flags},
		Data:   data,
	}})
	if err != nil {
		return err
	}
	for m, err := range s.conn.ReceiveIter() {
		if err != nil {
			return err
		}
		if m.Header.Sequence != sent[0].Header.Sequence {
			return errors.New("an answer to another question came")
		}
		take(m)
	}
	return nil
}

// attributes are the attributes of a message of netfilter's.
func attributes(m netlink.Message) func(yield func(uint16, []byte) bool) {
	if len(m.Data) < 4 {
		return func(func(uint16, []byte) bool) {}
	}
	return nested(m.Data[4:])
}

// nested are the attributes in b. What is cut short ends them.
func nested(b []byte) func(yield func(uint16, []byte) bool) {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			n := int(binary.NativeEndian.Uint16(b))
			if n < 4 || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:n]) {
				return
			}
			b = b[min(len(b), (n+3)&^3):]
		}
	}
}
