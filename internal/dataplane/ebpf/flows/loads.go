package flows

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// The programs count the active flows of endpoints (bpf/lib/events/endpoint_load.h), except for ends that they
// do not see. Each sweep counts the flows and the sockets again, and stores the differences.

// loadTable corrects the map loads. A nil *loadTable corrects nothing.
type loadTable struct {
	words   *ebpf.Memory
	sockets *link.Iter // nil: sockets cannot be listed
}

// openLoads returns nil without Config.BalanceByLoad, or if the kernel lacks support.
func (f *Table) openLoads() *loadTable {
	if !f.cfg.BalanceByLoad {
		return nil
	}
	words, err := f.m(objects.TCMapLoads).Memory()
	if err != nil {
		f.cfg.Log.Warn("Counts of active flows by endpoint are not corrected", "reason", err)
		return nil
	}
	t := &loadTable{words: words}
	program := f.objects.Programs[objects.SockProgCountedSockets]
	if program == nil || f.cfg.SocketHooks == objects.HooksOff {
		return t
	}
	t.sockets, err = link.AttachIter(link.IterOptions{Program: program, Map: f.m(objects.SockMapSocketFlows)})
	if err != nil {
		f.cfg.Log.Warn("Counts of open sockets by endpoint are not corrected", "reason", err)
	}
	return t
}

func (t *loadTable) close() {
	if t != nil && t.sockets != nil {
		_ = t.sockets.Close()
	}
}

// loadCount counts the flows of one sweep. A nil *loadCount counts nothing.
type loadCount struct {
	table          *loadTable
	before         []objects.TCLoad
	flows, sockets []uint32 // by place
}

// begin returns nil if no flow was counted yet.
func (t *loadTable) begin() *loadCount {
	if t == nil {
		return nil
	}
	before, err := t.read()
	if err != nil {
		return nil
	}
	for i := range before {
		if before[i] != (objects.TCLoad{}) {
			return &loadCount{table: t, before: before, flows: make([]uint32, len(before)), sockets: make([]uint32, len(before))}
		}
	}
	return nil
}

// read returns the whole map.
func (t *loadTable) read() ([]objects.TCLoad, error) {
	buf := make([]byte, t.words.Size())
	if _, err := t.words.ReadAt(buf, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	list := make([]objects.TCLoad, len(buf)/binary.Size(objects.TCLoad{}))
	_, err := binary.Decode(buf, binary.NativeEndian, list)
	return list, err
}

// count receives each live entry of the flow table.
func (c *loadCount) count(f *objects.TCFlow) {
	const mask = objects.TCFlowFlagsFLOW_COUNTED | objects.TCFlowFlagsFLOW_REPLY
	if c != nil && objects.TCFlowFlags(f.Flags)&mask == objects.TCFlowFlagsFLOW_COUNTED &&
		objects.TCFlowState(f.State) != objects.TCFlowStateFLOW_CLOSED {
		c.flows[f.Backend%uint32(len(c.flows))]++
	}
}

// finish stores what the programs have counted too much. Flows that began or ended meanwhile are
// in one of the two counts only: the middle of the programs' counts before and after is compared.
func (c *loadCount) finish() error {
	if c == nil {
		return nil
	}
	after, err := c.table.read()
	if err != nil {
		return fmt.Errorf("read loads of endpoints: %w", err)
	}
	for i, now := range after {
		c.table.correct(i, lostFlowsOffset, now.LostFlows, middle(c.before[i].Flows, now.Flows)-c.flows[i])
	}
	listed, err := c.countSockets()
	if err != nil || !listed {
		return err
	}
	c.before = after
	if after, err = c.table.read(); err != nil {
		return fmt.Errorf("read loads of endpoints: %w", err)
	}
	for i, now := range after {
		c.table.correct(i, lostSocketsOffset, now.LostSockets, middle(c.before[i].Sockets, now.Sockets)-c.sockets[i])
	}
	return nil
}

// middle returns the number halfway from a to b, which may have wrapped.
func middle(a, b uint32) uint32 { return a + uint32(int32(b-a)/2) }

// Offsets in struct load of bpf/abi.h.
const (
	loadSize          = 24
	lostFlowsOffset   = 16
	lostSocketsOffset = 20
)

// correct writes a field of which the agent is the only writer.
func (t *loadTable) correct(place, field int, have, want uint32) {
	if have == want {
		return
	}
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], want)
	_, _ = t.words.WriteAt(b[:], int64(place)*loadSize+int64(field))
}

// countSockets counts the open sockets whose flows are counted. listed is false if the kernel
// cannot list them.
func (c *loadCount) countSockets() (listed bool, err error) {
	if c.table.sockets == nil {
		return false, nil
	}
	r, err := c.table.sockets.Open()
	if err != nil {
		return false, fmt.Errorf("list open sockets: %w", err)
	}
	defer r.Close()
	all, err := eachRecord(r, 4, func(id []byte) bool {
		c.sockets[binary.NativeEndian.Uint32(id)%uint32(len(c.sockets))]++
		return true
	})
	return all, err
}

// eachRecord calls f for every record of an iterator of sockets, until f returns false. all is
// false if there are more.
func eachRecord(r io.Reader, size int, f func(record []byte) bool) (all bool, err error) {
	buf, have := make([]byte, 1<<16), 0
	for range endReads {
		n, err := r.Read(buf[have:])
		have += n
		rest := buf[:have]
		for ; len(rest) >= size; rest = rest[size:] {
			if !f(rest[:size]) {
				return false, nil
			}
		}
		have = copy(buf, rest)
		switch {
		case errors.Is(err, io.EOF):
			return true, nil
		case errors.Is(err, unix.EAGAIN): // the kernel pauses after a million sockets
		case err != nil:
			return false, fmt.Errorf("walk over sockets: %w", err)
		}
	}
	return false, nil
}
