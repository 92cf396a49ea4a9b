package upgrade

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// reservedFor is the timeout of a reservation. Drained renews those that have expired.
const reservedFor = 5 * time.Minute

// tcpEstablished is TCP_CONNTRACK_ESTABLISHED of
// include/uapi/linux/netfilter/nf_conntrack_tcp.h.
const tcpEstablished = 3

// errNoRoom ends reserveReplies early: the other half of the table is for new connections.
var errNoRoom = errors.New("the conntrack table is half full")

// reserve calls reserveReplies for the flow table of a previous instance, if there is one.
func reserve(cfg objects.Config) error {
	flows, err := flowsOf(cfg)
	if flows == nil || err != nil {
		return err
	}
	defer flows.Close()
	timeouts := timeoutsOf(cfg)
	return reserveReplies(context.Background(), flows, &timeouts)
}

// reserveReplies keeps the reply tuples of the established TCP connections from netfilter, which
// translates for other clients' connections, or for other addresses of a Service, meanwhile. A
// client may use one port for two of them. With the same endpoint, the second would get the
// first one's tuple: the endpoint would answer its SYN as part of the first, and these programs
// would translate the answer back to the first one's address. For a tuple that conntrack has,
// nf_nat takes another source port (nf_nat_used_tuple in net/netfilter/nf_nat_core.c).
//
// The endpoint's packets are the entry's original direction: a program that asks whether
// netfilter translates these replies must not find it (conntrack_sees_as_reply).
func reserveReplies(ctx context.Context, flows *ebpf.Map, t *objects.Timeouts) error {
	table, err := conntrack.Open()
	if errors.Is(err, conntrack.ErrUnsupported) {
		return nil
	}
	if err != nil {
		return err
	}
	defer table.Close()
	room, err := conntrackRoom()
	if err != nil {
		return err
	}
	err = eachOpen(ctx, flows, t, func(k *objects.TCTuple, f *objects.TCFlow) error {
		// A handshake is reserved when it is over: a flood of forged SYNs gets no entry.
		if !isReply(f) || objects.TCFlowState(f.State) < objects.TCFlowStateFLOW_ESTABLISHED {
			return nil
		}
		if room <= 0 {
			return errNoRoom
		}
		added, err := table.Add(reservation(k))
		if added {
			room--
		}
		return err
	})
	if errors.Is(err, errNoRoom) {
		return nil
	}
	return err
}

// conntrackRoom is how many entries may be added: with them, the table is half full at most.
func conntrackRoom() (int, error) {
	used, err := conntrack.ReadCount()
	if errors.Is(err, conntrack.ErrUnsupported) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	limits, err := conntrack.ReadLimits()
	if err != nil {
		return 0, err
	}
	return limits.Max/2 - used, nil
}

// reservation is the entry of a reply tuple.
func reservation(k *objects.TCTuple) *conntrack.Entry {
	from := netip.AddrPortFrom(objects.FromAddr(k.Saddr, k.Family), objects.ToPort(k.Sport))
	to := netip.AddrPortFrom(objects.FromAddr(k.Daddr, k.Family), objects.ToPort(k.Dport))
	return &conntrack.Entry{
		Protocol: uint8(model.TCP), TCPState: tcpEstablished, Timeout: reservedFor,
		Status: conntrack.SeenReply | conntrack.Assured,
		Orig:   conntrack.Tuple{Src: from, Dst: to}, Reply: conntrack.Tuple{Src: to, Dst: from},
	}
}
