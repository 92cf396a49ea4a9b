package node

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// The setting never stands without the ranges.
func TestIPsecRangesCoverTheSetting(t *testing.T) {
	b := newWriter(t, objects.Config{})
	must.Do(t, b.Write(&intent.Node{Name: "node"}))
	p := kernel.XfrmPolicy{Dir: kernel.XfrmOut, Src: netip.MustParsePrefix("10.1.0.0/16"), Dst: netip.MustParsePrefix("10.2.0.0/16")}
	var changes, looks atomic.Uint64
	var stop atomic.Bool
	var reader sync.WaitGroup
	reader.Go(func() {
		flag := func() bool {
			var s objects.TCSettings
			return b.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s) == nil && s.Flags&uint32(objects.TCSettingsFlagsSETTING_XFRM) != 0
		}
		for !stop.Load() {
			var one uint8
			before, first := changes.Load(), flag()
			missing := b.m(objects.TCMapClusterRanges).Lookup(objects.RangeKey(objects.RangeXfrmSrc, p.Src), &one) != nil
			if first && missing && flag() && changes.Load() == before {
				t.Error("the setting is there without the range")
				return
			}
			looks.Add(1)
		}
	})
	for range 300 {
		changes.Add(1)
		b.OnXfrm([]kernel.XfrmPolicy{p})
		changes.Add(1)
		b.OnXfrm(nil)
	}
	stop.Store(true)
	reader.Wait()
	if looks.Load() == 0 {
		t.Error("nothing was looked at")
	}
}
