package services

import (
	"log/slog"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

func replace(t *testing.T, w *Writer, ports ...*intent.ServicePort) {
	t.Helper()
	failed, err := w.Replace(t.Context(), ports)
	must.Do(t, err)
	must.Do(t, dataplane.PortErrorsOf(failed))
}

// TestNoEndpointIsGoneWhileADecisionIsUnknown: a failed write leaves a port without a decision.
func TestNoEndpointIsGoneWhileADecisionIsUnknown(t *testing.T) {
	w := New(&objects.Objects{Maps: newPortMaps(t, 64, 64)}, slog.New(slog.DiscardHandler))
	p := objectstest.SimplePort(1, 2)
	replace(t, w, p)
	want := func(when string, wantKnown bool) {
		t.Helper()
		is := false
		known := w.IfGone(func(gone func(objects.TCFrontendKey) bool) {
			is = gone(endpointKey(model.TCP, netip.MustParseAddrPort("192.0.2.1:80"))) && !gone(endpointKey(model.TCP, p.Endpoints[0].Addr))
		})
		if known != wantKnown || is != wantKnown {
			t.Errorf("%s: known %t, right %t", when, known, is)
		}
	}
	want("written", true)
	have := w.table.byID[p.ID]
	source := have.source
	have.beginUpdate()
	want("during a write", false)
	have.commitUpdate(source)
	want("after it", true)
}

// TestTheEndOfATerminatingEndpointIsReported: it was removed before, when it began to terminate.
func TestTheEndOfATerminatingEndpointIsReported(t *testing.T) {
	ended := 0
	w := New(&objects.Objects{Maps: newPortMaps(t, 64, 64)}, slog.New(slog.DiscardHandler))
	w.OnChanges(nil, func() { ended++ })
	serving, terminating, gone := objectstest.SimplePort(1, 2), objectstest.SimplePort(1, 1), objectstest.SimplePort(1, 1)
	terminating.Lingering = []netip.AddrPort{serving.Endpoints[1].Addr}
	replace(t, w, serving)
	replace(t, w, terminating)
	if ended == 0 {
		t.Error("the removal of an endpoint is not reported")
	}
	ended = 0
	replace(t, w, gone)
	if ended == 0 {
		t.Error("the end of a terminating endpoint is not reported")
	}
}
