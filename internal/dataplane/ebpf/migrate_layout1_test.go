package ebpf

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"unsafe"

	"spillway.dev/spillway/internal/facts/model"
)

func TestFlowsOfVersion1(t *testing.T) {
	if size := unsafe.Sizeof(flowV1{}); size != 80 {
		t.Fatalf("struct flow of version 1 has 80 bytes, not %d", size)
	}
	const reply, snat = uint8(tcFlowFlagsFLOW_REPLY), uint8(tcFlowFlagsFLOW_SNAT)
	tcp, udp := tcTuple{Proto: uint8(model.TCP)}, tcTuple{Proto: uint8(model.UDP)}
	type want struct {
		state tcFlowState
		flags tcFlowFlags
	}
	for _, tt := range []struct {
		name string
		key  tcTuple
		old  flowV1
		want *want
	}{
		{"a connection", tcp, flowV1{State: v1Established, Flags: reply | snat}, &want{tcFlowStateFLOW_ESTABLISHED, tcFlowFlagsFLOW_REPLY | tcFlowFlagsFLOW_SNAT | tcFlowFlagsFLOW_CONFIRMED}},
		{"one side has closed", tcp, flowV1{State: v1Closing, Flags: uint8(tcFlowFlagsFLOW_FIN)}, &want{tcFlowStateFLOW_CLOSING, tcFlowFlagsFLOW_FIN | tcFlowFlagsFLOW_CONFIRMED}},
		{"reset", tcp, flowV1{State: v1Closed, Flags: uint8(tcFlowFlagsFLOW_RESET)}, &want{tcFlowStateFLOW_CLOSED, tcFlowFlagsFLOW_RESET | tcFlowFlagsFLOW_CONFIRMED}},
		{"half open", tcp, flowV1{State: v1New}, nil},
		{"a question", udp, flowV1{State: v1New, Flags: reply}, &want{tcFlowStateFLOW_NEW, tcFlowFlagsFLOW_REPLY}},
		{"a stream", udp, flowV1{State: v1Established, Flags: v1Stream}, &want{tcFlowStateFLOW_ESTABLISHED, tcFlowFlagsFLOW_STREAM}},
		{"no state", tcp, flowV1{}, nil},
	} {
		tt.old.Sport, tt.old.Dport, tt.old.Backend, tt.old.Seen = 1, 2, 3, uint32(monotonic()/int64(time.Second))-4
		_, f, keep := flowFromV1(tt.key, tt.old)
		if keep != (tt.want != nil) {
			t.Errorf("%s: kept %v", tt.name, keep)
		}
		if !keep {
			continue
		}
		if tcFlowState(f.State) != tt.want.state || tcFlowFlags(f.Flags) != tt.want.flags {
			t.Errorf("%s: state %d, flags %#x, want %+v", tt.name, f.State, f.Flags, *tt.want)
		}
		if f.Sport != 1 || f.Dport != 2 || f.Backend != 3 || bootSeconds()-f.Seen-4 > 1 || f.NextHopSeen != 0 {
			t.Errorf("%s: %+v", tt.name, f)
		}
	}
	_, f, _ := flowFromV1(udp, flowV1{State: v1Established, Ended: v1Answered, WayIfindex: 7})
	if tcRequestProgress(f.End) != tcRequestProgressREQUEST_ANSWERED || f.Answers != 7 {
		t.Errorf("an answered request: %+v", f)
	}
}

// The programs skip work for features that no packet has used, so a migrated flow is
// only translated if the flags of version 1 come with it.
func TestFeaturesSeenKeepTheirFlagsFromVersion1(t *testing.T) {
	cfg := ownPlace(t)
	older := filepath.Join(cfg.BPFFS, "maps-v1")
	noError(t, os.MkdirAll(older, 0o700))
	m, err := ebpf.NewMapWithOptions(&ebpf.MapSpec{
		Name: "stack_flows", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1, Pinning: ebpf.PinByName,
	}, ebpf.MapOptions{PinPath: older})
	noError(t, err)
	defer m.Close()
	noError(t, m.Put(uint32(0), uint32(tcFeatureFEATURE_STACK_FLOW)))

	b, err := New(t.Context(), cfg)
	noError(t, err)
	defer b.Close()
	var flags uint32
	noError(t, b.m(tcMapFeaturesSeen).Lookup(uint32(0), &flags))
	if flags != uint32(tcFeatureFEATURE_STACK_FLOW) {
		t.Errorf("features_seen is %#x", flags)
	}
}
