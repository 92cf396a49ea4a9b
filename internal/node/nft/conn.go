package nft

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// messageBuffer is the size of one receive. The kernel returns a dump in pieces of up to 32
// KiB if the reader has room for them, and begins each piece by skipping all earlier
// elements: small pieces make it slow.
const messageBuffer = 128 << 10

// patience bounds the time of one batch or dump.
const patience = 2 * time.Minute

// Conn reads and writes nf_tables of one network namespace. It opens its socket in the
// network namespace of the calling thread: in Open, or else when it is first needed, and
// again after an error. The zero Conn is ready to use, by one goroutine at a time.
type Conn struct {
	sock  *netlink.Conn
	sndb  int
	watch *Watch
}

// Open opens the socket, unless it is open.
func (c *Conn) Open() error {
	if c.sock != nil {
		return nil
	}
	sock, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: messageBuffer})
	if err != nil {
		return fmt.Errorf("open netlink socket to netfilter: %w", err)
	}
	_ = sock.SetOption(netlink.ExtendedAcknowledge, true) // for errors with a text
	c.sock, c.sndb = sock, 0
	if c.watch != nil {
		_ = c.watch.sub.IgnorePort(sock.PID()) // without it, own changes look like another program's
	}
	return nil
}

// Close closes the socket and ends the watch.
func (c *Conn) Close() error {
	var err error
	if c.watch != nil {
		err = c.watch.Close()
		c.watch = nil
	}
	c.reset()
	return err
}

func (c *Conn) reset() {
	if c.sock != nil {
		_ = c.sock.Close()
		c.sock = nil
	}
}

// Watch calls changed from its own goroutine after another program has changed the table,
// until Close. One call may cover several changes. Lost notifications count as a change.
func (c *Conn) Watch(t Table, changed func()) error {
	w, err := watchTable(t, changed)
	if err != nil {
		return err
	}
	c.watch = w
	if err := c.Open(); err != nil {
		return err
	}
	return w.sub.IgnorePort(c.sock.PID())
}

// do runs f with an open socket. It closes the socket after an error: answers to the
// failed request may still arrive.
func (c *Conn) do(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := c.Open(); err != nil {
		return err
	}
	err := c.sock.SetDeadline(time.Now().Add(patience))
	if err == nil {
		err = f()
	}
	if err != nil {
		c.reset()
	}
	return err
}

// Committed is the result of a Commit.
type Committed struct {
	generation uint32 // read after the commit
	batches    uint32
}

// Follows reports whether no other program has committed since the generation, and returns
// the current one.
func (c Committed) Follows(generation uint32) (current uint32, ok bool) {
	return c.generation, c.generation == generation+c.batches
}

// Commit makes the changes of all transactions in one batch: all of them, or none and an
// error.
func (c *Conn) Commit(ctx context.Context, transactions ...*Transaction) (done Committed, err error) {
	err = c.do(ctx, func() error {
		msgs, size := concat(transactions)
		if len(msgs) > 0 {
			if err := c.send(msgs, size, true); err != nil {
				return err
			}
			done.batches = 1
		}
		done.generation, err = c.readGeneration()
		return nil // the changes are made
	})
	return done, err
}

// CommitParts commits transactions one after the other, each in its own batch.
func (c *Conn) CommitParts(ctx context.Context, parts []*Transaction) (done Committed, err error) {
	for _, part := range parts {
		batches := done.batches
		if done, err = c.Commit(ctx, part); err != nil {
			return done, err
		}
		done.batches += batches
	}
	return done, nil
}

// Check returns the error that Commit would return, and changes nothing: the kernel does
// not carry out a batch without an end.
func (c *Conn) Check(ctx context.Context, t *Transaction) error {
	return c.do(ctx, func() error { return c.send(t.messages(), t.size, false) })
}

func concat(transactions []*Transaction) (msgs []netlink.Message, size int) {
	for _, t := range transactions {
		msgs, size = append(msgs, t.messages()...), size+t.size
	}
	return msgs, size
}

// send sends a batch and waits until the kernel has carried it out, or checked it.
func (c *Conn) send(changes []netlink.Message, size int, end bool) error {
	if need := size + 1<<16; need > c.sndb {
		if err := c.sock.SetWriteBuffer(need); err != nil {
			return fmt.Errorf("make send buffer hold a batch of %d bytes: %w", size, err)
		}
		c.sndb = need
	}
	marker := func(typ netlink.HeaderType) netlink.Message {
		return netlink.Message{
			Header: netlink.Header{Type: typ, Flags: netlink.Request},
			Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
		}
	}
	msgs := append([]netlink.Message{marker(unix.NFNL_MSG_BATCH_BEGIN)}, changes...)
	last := len(msgs) - 1
	// The kernel answers each error. One requested answer reports the end.
	msgs[last].Header.Flags |= netlink.Acknowledge
	if end {
		msgs = append(msgs, marker(unix.NFNL_MSG_BATCH_END))
	}
	sent, err := c.sock.SendMessages(msgs)
	if err != nil {
		return fmt.Errorf("send batch of %d bytes: %w", size, err)
	}
	for {
		answers, err := c.sock.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("change nf_tables: the kernel refused more changes than its answers had room for, so another program has changed "+
				"the table: %w", err)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", refused(err, sent), err)
		}
		for _, m := range answers {
			if m.Header.Type == netlink.Error && m.Header.Sequence == sent[last].Header.Sequence {
				return nil
			}
		}
	}
}

// refused describes the change that an error is about.
func refused(err error, sent []netlink.Message) string {
	const unknown = "change nf_tables"
	var op *netlink.OpError
	if !errors.As(err, &op) {
		return unknown
	}
	i := slices.IndexFunc(sent, func(m netlink.Message) bool { return m.Header.Sequence == op.Sequence })
	if i <= 0 {
		return unknown
	}
	typ := int(sent[i].Header.Type) & 0xff
	attrs := payload(sent[i].Data)
	object := " " + String(Attribute(attrs, attrTable))
	if name := String(Attribute(attrs, cmp.Or(nameAttrs[typ], 2))); name != "" {
		object += " " + name
	}
	return verbs[typ] + object
}

var nameAttrs = map[int]uint16{unix.NFT_MSG_NEWCHAIN: unix.NFTA_CHAIN_NAME, unix.NFT_MSG_DELCHAIN: unix.NFTA_CHAIN_NAME}

var verbs = map[int]string{
	unix.NFT_MSG_NEWTABLE: "add table", unix.NFT_MSG_DELTABLE: "delete table",
	unix.NFT_MSG_NEWSET: "add set", unix.NFT_MSG_DELSET: "delete set",
	unix.NFT_MSG_NEWCHAIN: "add chain", unix.NFT_MSG_DELCHAIN: "delete chain",
	unix.NFT_MSG_NEWRULE: "add rule to", unix.NFT_MSG_DELRULE: "flush chain",
	unix.NFT_MSG_NEWOBJ: "add ct helper", unix.NFT_MSG_DELOBJ: "delete ct helper",
	unix.NFT_MSG_NEWSETELEM: "add elements to", unix.NFT_MSG_DELSETELEM: "delete elements of",
}

// Generation returns the number of batches that all programs have committed.
func (c *Conn) Generation(ctx context.Context) (g uint32, err error) {
	err = c.do(ctx, func() error { g, err = c.readGeneration(); return err })
	return g, err
}

func (c *Conn) readGeneration() (g uint32, err error) {
	found := false
	err = c.request(unix.NFT_MSG_GETGEN, 0, header(unix.AF_UNSPEC), func(m netlink.Message) {
		if v := Attribute(payload(m.Data), unix.NFTA_GEN_ID); v != nil {
			g, found = Number(v), true
		}
	})
	if err == nil && !found {
		err = errors.New("the kernel does not report it")
	}
	if err != nil {
		return 0, fmt.Errorf("read generation of nf_tables: %w", err)
	}
	return g, nil
}

// request sends one message and calls take with each answer. A dump that other programs
// disturb is complete all the same.
func (c *Conn) request(typ int, flags netlink.HeaderFlags, data attrs, take func(netlink.Message)) error {
	sent, err := c.sock.SendMessages([]netlink.Message{{Header: messageHeader(typ, flags), Data: data}})
	if err != nil {
		return err
	}
	for m, err := range c.sock.ReceiveIter() {
		if err != nil {
			return err
		}
		if m.Header.Sequence != sent[0].Header.Sequence {
			return errors.New("an answer to another request arrived")
		}
		take(m)
	}
	return nil
}

// missing reports whether an error says that the kernel has no nf_tables.
func missing(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)
}
