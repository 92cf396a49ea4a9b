package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// Drain stops a previous instance's programs from accepting new connections: it deletes
// all Service addresses, and replies that netfilter translates traverse netfilter. TCP flows
// continue until Cleanup. New UDP packets belong to the other dataplane at once,
// because a UDP flow has no end. Pending UDP replies are still translated. Missing
// objects are no error. any reports whether a Service was served; then Drain waits for
// half of cfg.Linger, so that netfilter sees the running connections with endpoints' own addresses.
func Drain(cfg objects.Config) (any bool, err error) {
	var dirs []string
	for _, dir := range objects.Layouts(cfg.BPFFS) {
		// First: netfilter may have to translate the reply to the very next request.
		err := askConntrack(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		serves, e := serves(dir)
		if err := errors.Join(err, e); err != nil {
			return any, err
		}
		dirs, any = append(dirs, dir), any || serves
	}
	if any {
		// A client may use one port both for a connection to an endpoint, which
		// bypassed netfilter, and for one to the Service. The dataplane that translates
		// the second must know of the first.
		time.Sleep(cfg.Linger / 2)
	}
	err = reserve(cfg)
	for _, dir := range dirs {
		err = errors.Join(err, deleteFrontends(dir, objects.IsService), deleteBackends(dir))
	}
	if len(dirs) > 0 {
		err = errors.Join(err, reserve(cfg)) // the last connections
	}
	return any, err
}

// serves reports whether the programs of a layout know any Service.
func serves(dir string) (any bool, err error) {
	frontends, err := objects.OpenPinned(dir, objects.TCMapFrontends)
	if err != nil {
		return false, err
	}
	defer frontends.Close()
	err = objects.Each(frontends, func(_ objects.TCFrontendKey, f objects.TCFrontend) { any = any || objects.IsService(&f) })
	return any, err
}

// drainInterval is the minimum time between two reads of the flow table.
const drainInterval = 2 * time.Second

// Drained waits until the connections that the programs translate have ended, at
// most for the timeout of an idle one, or until ctx ends. The programs do nothing else
// by then, because no agent updates the maps: packets of endpoints are left to
// netfilter, and UDP belongs to the new dataplane at once. Call it after Drain, when
// the last replies are through.
func Drained(ctx context.Context, cfg objects.Config) error {
	flows, err := flowsOf(cfg)
	if flows == nil || err != nil {
		return err
	}
	defer flows.Close()
	err = deleteFrontends(objects.MapsDir(cfg.BPFFS), func(*objects.TCFrontend) bool { return true })
	if err := errors.Join(attach.DetachCgroup(cfg.BPFFS), err, endDatagrams(ctx, flows, cfg.Linger/2)); err != nil {
		return err
	}
	timeouts := timeoutsOf(cfg)
	begun, logged, warned := time.Now(), false, false
	for {
		start := time.Now()
		open, unreserved, err := keepOpen(ctx, flows, &timeouts)
		if err != nil || open == 0 || time.Since(begun) > timeouts.TCPEstablished {
			return err
		}
		if unreserved != nil && !warned {
			warned = true
			cfg.Log.Warn("Netfilter may give the ports of these connections to others", "connections", open, "reason", unreserved)
		}
		if !logged {
			logged = true
			cfg.Log.Info("the eBPF programs stay until the connections end that they translate", "connections", open)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(drainInterval, 20*time.Since(start))):
		}
	}
}

// reserve calls keepOpen for the flow table of a previous instance, if there is one.
func reserve(cfg objects.Config) error {
	flows, err := flowsOf(cfg)
	if flows == nil || err != nil {
		return err
	}
	defer flows.Close()
	timeouts := timeoutsOf(cfg)
	_, unreserved, err := keepOpen(context.Background(), flows, &timeouts)
	return errors.Join(err, unreserved)
}

func timeoutsOf(cfg objects.Config) objects.Timeouts {
	if cfg.Timeouts == (objects.Timeouts{}) {
		return objects.DefaultTimeouts
	}
	return cfg.Timeouts
}

// keepOpen counts the TCP connections that have not ended, and makes reservations for them.
// unreserved says why some have none: they go on all the same.
func keepOpen(ctx context.Context, flows *ebpf.Map, t *objects.Timeouts) (open int, unreserved, err error) {
	reserved := openReservations()
	defer reserved.close()
	err = objects.EachFlow(ctx, flows, func(k *objects.TCTuple, f *objects.TCFlow, now uint32) error {
		switch {
		case model.Protocol(k.Proto) != model.TCP || objects.TCFlowState(f.State) == objects.TCFlowStateFLOW_CLOSED || t.Dead(k, f, now):
		case objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY != 0:
			reserved.add(k, f)
		default:
			open++
		}
		return nil
	})
	return open, reserved.err, err
}

// endDatagrams deletes all flows of UDP and ICMP except those that give a packet of the node's stack another
// port because a flow uses the packet's own (serve_port_conflict). From then on no packet
// needs another port. endDatagrams waits for the replies to the packets that got one, since they
// are lost when the programs are detached.
func endDatagrams(ctx context.Context, flows *ebpf.Map, replies time.Duration) error {
	found := false
	err := objects.EachFlow(ctx, flows, func(k *objects.TCTuple, f *objects.TCFlow, _ uint32) error {
		if model.Protocol(k.Proto) == model.TCP {
			return nil
		}
		found = true
		if objects.TCFlowHelper(f.Helper) == objects.TCFlowHelperHELPER_NODE {
			return nil
		}
		if err := flows.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete from eBPF map %s: %w", objects.TCMapFlows, err)
		}
		return nil
	})
	if err != nil || !found {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(replies):
		return nil
	}
}

// flowsOf opens the flow table of a previous instance. It returns nil if there is none.
func flowsOf(cfg objects.Config) (*ebpf.Map, error) {
	flows, err := objects.OpenPinned(objects.MapsDir(cfg.BPFFS), objects.TCMapFlows)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return flows, err
}

// askConntrack calls StartDraining for a layout, whose maps may be missing.
func askConntrack(dir string) error {
	m, err := objects.OpenPinned(dir, objects.TCMapNodeSettings)
	if err != nil {
		return err
	}
	defer m.Close()
	return StartDraining(m)
}

// StartDraining sets SETTING_ASK_CONNTRACK and SETTING_DRAINS. Packets that bypassed
// netfilter on their path to an endpoint traverse it from the next request on. Their
// replies do so after netfilter has seen a request. An agent keeps both flags until it has
// written its Services.
func StartDraining(settings *ebpf.Map) error {
	var s objects.TCSettings
	if err := settings.Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	s.Flags |= uint32(objects.TCSettingsFlagsSETTING_ASK_CONNTRACK | objects.TCSettingsFlagsSETTING_DRAINS)
	if err := settings.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

// deleteFrontends deletes the frontends of a layout for which drop is true. The error is
// fs.ErrNotExist if there are no maps.
func deleteFrontends(dir string, drop func(*objects.TCFrontend) bool) error {
	frontends, err := objects.OpenPinned(dir, objects.TCMapFrontends)
	if err != nil {
		return err
	}
	defer frontends.Close()
	_, err = deleteWhere(frontends, func(_ objects.TCFrontendKey, f objects.TCFrontend) bool { return drop(&f) })
	return err
}

// deleteBackends deletes the backends of a layout. The programs then accept no datagram
// for a known flow (flow_check).
func deleteBackends(dir string) error {
	backends, err := objects.OpenPinned(dir, objects.TCMapBackends)
	if err != nil {
		return err
	}
	defer backends.Close()
	if _, err = deleteWhere(backends, func(uint32, objects.TCBackend) bool { return true }); err != nil {
		return err
	}
	changes, err := objects.OpenPinned(dir, objects.TCMapServiceChanges)
	if errors.Is(err, fs.ErrNotExist) { // the programs are older, and look at each datagram
		return nil
	}
	if err != nil {
		return err
	}
	defer changes.Close()
	return objects.CountChange(changes)
}

// deleteWhere deletes the entries of a map for which drop is true, and counts them.
func deleteWhere[K, V any](m *ebpf.Map, drop func(K, V) bool) (n int, err error) {
	var keys []K
	err = objects.Each(m, func(k K, v V) {
		if drop(k, v) {
			keys = append(keys, k)
		}
	})
	for _, k := range keys {
		if e := m.Delete(k); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, fmt.Errorf("delete from eBPF map %s: %w", m, e))
		}
	}
	return len(keys), err
}
