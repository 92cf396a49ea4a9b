package nft

import (
	"errors"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

// Watch receives notifications of changes of nf_tables: by nft, by another proxy, or by the
// nft variant of iptables.
type Watch struct {
	sub  *kernel.Subscription
	done chan struct{}
}

// Change is one notification: an object was added or deleted.
type Change struct {
	Message uint16 // unix.NFT_MSG_*
	Object  []byte // payload of the message
}

// Follow calls onUpdate with the changes of each commit in the calling thread's network
// namespace, from its own goroutine. lost says that notifications were lost. Changes are
// valid until onUpdate returns.
func Follow(onUpdate func(changes []Change, lost bool)) (*Watch, error) {
	sub, err := kernel.SubscribeNetfilter(unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, err
	}
	w := &Watch{sub: sub, done: make(chan struct{})}
	go w.run(onUpdate)
	return w, nil
}

func (w *Watch) run(onUpdate func([]Change, bool)) {
	defer close(w.done)
	for {
		news, err := w.sub.Receive()
		if err != nil && !errors.Is(err, kernel.ErrOverrun) {
			return // closed
		}
		var changes []Change
		for _, n := range news {
			if n.Type>>8 == unix.NFNL_SUBSYS_NFTABLES && n.Type&0xff != unix.NFT_MSG_NEWGEN {
				changes = append(changes, Change{n.Type & 0xff, n.Data})
			}
		}
		onUpdate(changes, err != nil)
	}
}

// watchTable calls changed after changes of one table.
func watchTable(t Table, changed func()) (*Watch, error) {
	return Follow(func(changes []Change, lost bool) {
		for _, c := range changes {
			lost = lost || tableOf(c.Object).Same(t)
		}
		if lost {
			changed()
		}
	})
}

// Close ends the watch.
func (w *Watch) Close() error {
	err := w.sub.Close()
	<-w.done
	return err
}
