package ebpf

import (
	"bytes"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// There has been no version 0. In this one flows are of IPv4 alone, and remember
// nothing of the routing table.
type (
	tupleV0 struct {
		Saddr, Daddr uint32
		Sport, Dport uint16
		Proto        uint8
		_            [3]uint8
	}
	flowV0 struct {
		Saddr, Daddr           uint32
		Sport, Dport           uint16
		State, Flags           uint8
		_                      [2]uint8
		Seen, Backend, Service uint32
	}
)

// flowFromV0 is what a developer writes after changing struct flow.
func flowFromV0(k tupleV0, f flowV0) (objects.TCTuple, objects.TCFlow, bool) {
	return objects.TCTuple{
			Saddr: objects.TCAddr{W: [4]uint32{k.Saddr}}, Daddr: objects.TCAddr{W: [4]uint32{k.Daddr}},
			Sport: k.Sport, Dport: k.Dport, Proto: k.Proto, Family: uint8(model.IPv4),
		}, objects.TCFlow{
			Saddr: objects.TCAddr{W: [4]uint32{f.Saddr}}, Daddr: objects.TCAddr{W: [4]uint32{f.Daddr}},
			Sport: f.Sport, Dport: f.Dport, State: f.State, Flags: uint16(f.Flags),
			Seen: f.Seen, Backend: f.Backend, Service: f.Service,
		}, objects.TCFlowState(f.State) != objects.TCFlowStateFLOW_CLOSED
}

func flowToV0(k objects.TCTuple, f objects.TCFlow) (tupleV0, flowV0) {
	return tupleV0{Saddr: k.Saddr.W[0], Daddr: k.Daddr.W[0], Sport: k.Sport, Dport: k.Dport, Proto: k.Proto},
		flowV0{
			Saddr: f.Saddr.W[0], Daddr: f.Daddr.W[0], Sport: f.Sport, Dport: f.Dport, State: f.State, Flags: uint8(f.Flags),
			Seen: f.Seen, Backend: f.Backend, Service: f.Service,
		}
}

// setMigrations are those known until the test ends.
func setMigrations(t *testing.T, m map[int]upgrade.Migration) {
	t.Helper()
	was := upgrade.Migrations
	upgrade.Migrations = m
	t.Cleanup(func() { upgrade.Migrations = was })
}

var fromV0 = map[int]upgrade.Migration{0: {objects.TCMapFlows: upgrade.Entries(flowFromV0)}, 1: {}, 2: {}}

// makeV0 turns the pinned maps into those of version 0, with these flows; the
// rest are the same in both. It gives the map of flows.
func makeV0(t *testing.T, bpffs string, flows map[objects.TCTuple]objects.TCFlow) *ebpf.Map {
	t.Helper()
	older := filepath.Join(bpffs, "maps-v0")
	must.Do(t, os.Mkdir(older, 0o700))
	pins, err := os.ReadDir(objects.MapsDir(bpffs))
	must.Do(t, err)
	for _, pin := range pins {
		if pin.Name() == objects.TCMapFlows {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(bpffs), pin.Name()), nil)
		must.Do(t, err)
		must.Do(t, upgrade.PinAgain(m, filepath.Join(older, pin.Name())))
		m.Close()
	}
	m, err := ebpf.NewMapWithOptions(&ebpf.MapSpec{
		Name: objects.TCMapFlows, Type: ebpf.LRUHash, KeySize: 16, ValueSize: 28, MaxEntries: 4096, Pinning: ebpf.PinByName,
	}, ebpf.MapOptions{PinPath: older})
	must.Do(t, err)
	t.Cleanup(func() { m.Close() })
	for k, f := range flows {
		k0, f0 := flowToV0(k, f)
		must.Do(t, m.Put(k0, f0))
	}
	must.Do(t, os.RemoveAll(objects.MapsDir(bpffs)))
	return m
}

// flowsV4 are both directions of some flows.
func flowsV4(from, to uint32) map[objects.TCTuple]objects.TCFlow {
	out := map[objects.TCTuple]objects.TCFlow{}
	for n := from; n < to; n++ {
		keys, flows := objectstest.Flow(n, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, objects.BootSeconds())
		flows[0].Daddr.W[0], flows[0].Daddr.W[1] = 1000+n, 0
		keys[1].Saddr = flows[0].Daddr
		for i := range keys {
			keys[i].Family, flows[i].Backend, flows[i].Service = uint8(model.IPv4), n, n+1
			out[keys[i]] = flows[i]
		}
	}
	return out
}

func pinnedFlows(t *testing.T, bpffs string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(bpffs), objects.TCMapFlows), nil)
	must.Do(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

func upgradeState() intent.State {
	return intent.State{
		Ports: []*intent.ServicePort{objectstest.SimplePort(1, 3), objectstest.SimplePort(2, 2)},
		Node: intent.Node{
			Name: "node", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.10")}, Peers: []netip.Addr{netip.MustParseAddr("192.0.2.11")},
			ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/48")},
		},
	}
}

// closeOne adds one of the flows to late, as a program that closes it does.
func closeOne(flows, late map[objects.TCTuple]objects.TCFlow) {
	for k, f := range flows {
		f.State = uint8(objects.TCFlowStateFLOW_CLOSING)
		late[k] = f
		return
	}
}

// The whole way: version 0 runs, this version comes.
func TestUpgradeCarriesFlowsOver(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	cfg.FlowTableSize = 8192
	setMigrations(t, fromV0)
	before := runBackend(t, cfg, upgradeState(), nil)
	running, late := flowsV4(1, 1000), flowsV4(2000, 2010)
	closed := flowsV4(3000, 3010)
	for k, f := range closed {
		f.State = uint8(objects.TCFlowStateFLOW_CLOSED)
		closed[k] = f
	}
	older := makeV0(t, cfg.BPFFS, running)
	for k, f := range closed {
		k0, f0 := flowToV0(k, f)
		must.Do(t, older.Put(k0, f0))
	}
	// Another agent was killed while it did the same.
	must.Do(t, os.MkdirAll(filepath.Join(objects.MapsDir(cfg.BPFFS)+"-new", "half"), 0o700))

	after := runBackend(t, cfg, upgradeState(), func() {
		objectstest.WantSame(t, "flows before Replace",
			objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), running)
		objectstest.WantSame(t, "programs before Replace", programIDs(t, cfg), before.programs)
		// The old programs go on until then.
		closeOne(running, late)
		for k, f := range late {
			k0, f0 := flowToV0(k, f)
			must.Do(t, older.Put(k0, f0))
		}
	})
	maps.Copy(running, late)
	objectstest.WantSame(t, "flows", objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), running)
	objectstest.WantSame(t, "links", after.links, before.links)
	objectstest.WantSame(t, "endpoints", after.endpoints, before.endpoints)
	wantChanged(t, after.maps, before.maps, objects.TCMapFlows)
	wantUses(t, cfg, after.maps)
	for hook, id := range after.programs {
		if id == before.programs[hook] {
			t.Errorf("%s still has the program of before", hook)
		}
	}
	wantOnlyOwnMaps(t, cfg)
	// Once is enough: what is there now is of this version.
	again := runBackend(t, cfg, upgradeState(), nil)
	objectstest.WantSame(t, "maps of the next run", again.maps, after.maps)
}

// An agent that is killed between its first look at the older maps and the end
// leaves the rest to the next one. What new programs have written stays.
func TestUpgradeGoesOnAfterAKill(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	setMigrations(t, fromV0)
	_ = runBackend(t, cfg, upgradeState(), nil)
	flows, late := flowsV4(1, 100), flowsV4(200, 210)
	older := makeV0(t, cfg.BPFFS, flows)
	pins, err := os.ReadDir(filepath.Join(cfg.BPFFS, "maps-v0"))
	must.Do(t, err)
	killed, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, killed.Close())
	if left, err := os.ReadDir(filepath.Join(cfg.BPFFS, "maps-v0")); err != nil || len(left) != len(pins) {
		t.Errorf("of %d older maps %d are left before anybody has done without them (%v)", len(pins), len(left), err)
	}

	for k, f := range late {
		k0, f0 := flowToV0(k, f)
		must.Do(t, older.Put(k0, f0))
	}
	for k, f := range flows {
		f.NextHopMtu = 1400
		flows[k] = f
		must.Do(t, pinnedFlows(t, cfg.BPFFS).Put(k, f))
		break
	}
	_ = runBackend(t, cfg, upgradeState(), nil)
	for k, f := range late {
		flows[k] = f
	}
	objectstest.WantSame(t, "flows", objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), flows)
	wantOnlyOwnMaps(t, cfg)
}

// Flows that cannot be carried over are said to be lost, in one line, and nothing
// else is.
func TestUpgradeSaysWhatIsForgotten(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	misfit := upgrade.Entries(func(k uint64, f flowV0) (tupleV0, flowV0, bool) { return tupleV0{}, f, true })
	refused := func(upgrade.Entry) (upgrade.Entry, bool, error) {
		return upgrade.Entry{}, false, errors.New("no such thing")
	}
	for _, tt := range []struct {
		what    string
		known   map[int]upgrade.Migration
		version string
		want    string
	}{
		{"no migration", nil, "maps-v0", "no migration from version 0 to 1 is known"},
		{"a migration of other types", map[int]upgrade.Migration{0: {objects.TCMapFlows: misfit}, 1: {}, 2: {}}, "maps-v0", "do not fit uint64"},
		{"a migration that fails", map[int]upgrade.Migration{0: {objects.TCMapFlows: refused}, 1: {}, 2: {}}, "maps-v0", "no such thing"},
		{"a downgrade", fromV0, "maps-v4", "version 4 is newer"},
	} {
		setMigrations(t, tt.known)
		_ = runBackend(t, cfg, upgradeState(), nil)
		makeV0(t, cfg.BPFFS, flowsV4(1, 10))
		if older := filepath.Join(cfg.BPFFS, "maps-v0"); tt.version != "maps-v0" {
			must.Do(t, os.Rename(older, filepath.Join(cfg.BPFFS, tt.version)))
		}
		var log bytes.Buffer
		cfg.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		after := runBackend(t, cfg, upgradeState(), nil) // which wants what is applied
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 1 || !strings.Contains(lines[0], "Running flows are forgotten") || !strings.Contains(lines[0], tt.want) {
			t.Errorf("%s: said %q, want one line with %q", tt.what, lines, tt.want)
		}
		if left := objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)); len(left) > 0 {
			t.Errorf("%s: %d flows", tt.what, len(left))
		}
		wantUses(t, cfg, after.maps)
		if dirs := objects.Layouts(cfg.BPFFS); !slices.Equal(dirs, []string{objects.MapsDir(cfg.BPFFS)}) {
			t.Errorf("%s: there are %v", tt.what, dirs)
		}
	}
}

// A packet does not notice.
func TestPacketsOfFlowsCarriedOver(t *testing.T) {
	n := newPacketNode(t)
	n.spent = true // its programs and maps are replaced
	p := plans["IPv4"]
	setMigrations(t, fromV0)
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	client, front, far := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080)
	seen := map[uint8]netip.AddrPort{}
	for _, proto := range transports {
		seen[proto] = n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: first(proto)}).v.src
	}
	makeV0(t, n.cfg.BPFFS, objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, n.m(objects.TCMapFlows)))
	features, err := kernel.Probe(kernel.Place{BPFFS: n.cfg.BPFFS})
	must.Do(t, err)
	n.onThread(t, func() error {
		o, _, err := upgrade.Open(&n.cfg, features)
		if err != nil {
			return err
		}
		n.objects.Close()
		n.objects = o
		return nil
	})
	for _, proto := range transports {
		r := n.send(t, inTun0, frame{proto: proto, src: far, dst: seen[proto], flags: "S."})
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, front, client)
		r = n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "."})
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, seen[proto], far)
	}
}
