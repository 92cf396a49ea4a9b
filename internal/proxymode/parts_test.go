package proxymode

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/test/await"
)

// A batch holds up the changes of all Services that come while the kernel carries it out.
func TestALargeServiceHoldsUpNoOther(t *testing.T) {
	netnstest.Enter(t)
	service := func(name string, addr byte, ports, endpoints int) model.Delta {
		n := model.Name{Namespace: "default", Name: name}
		s := &model.Service{Name: n, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, addr})}}
		slice := &model.EndpointSlice{Name: n, Service: n, Family: model.IPv4}
		for i := range ports {
			port := fmt.Sprint("p", i)
			s.Ports = append(s.Ports, model.ServicePort{Name: port, Protocol: model.TCP, Port: uint16(1000 + i)})
			slice.Ports = append(slice.Ports, model.EndpointPort{Name: port, Protocol: model.TCP, Port: uint16(8000 + i)})
		}
		for i := range endpoints {
			slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: netip.AddrFrom4([4]byte{10, addr, byte(i >> 8), byte(i)}),
				Ready: true, Serving: true})
		}
		return model.Delta{Services: map[model.Name]*model.Service{n: s}, Slices: map[model.Name]*model.EndpointSlice{n: slice}}
	}
	b, err := nftables.New(t.Context(), nftables.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	var r *reconcile.Reconciler
	var mu sync.Mutex
	var written []string // the last Service of each batch
	deliver := sync.OnceFunc(func() { r.Deliver(service("small", 2, 1, 3), nil) })
	r, err = reconcile.New(reconcile.Config{
		Tracker: decisions.New(intent.Config{NodeName: "node0"}, donottrack.Config{}), SyncPeriod: time.Hour,
		Backends: []dataplane.Backend{recording{b, func(c intent.Changes) {
			mu.Lock()
			defer mu.Unlock()
			written = append(written, c.Upserts[len(c.Upserts)-1].ID.Service.Name)
			deliver()
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	r.SetNodeAddrs(nil)
	r.Deliver(model.Delta{Full: true}, nil)
	await.True(t, "the first sync is done", func() bool { return !r.Status().LastSynced.IsZero() })
	r.Deliver(service("large", 1, 3*(1<<15)/1000, 1000), nil)
	await.True(t, "both Services are written", func() bool {
		status := r.Status()
		return status.Services == 2 && status.PendingSince.IsZero()
	})
	mu.Lock()
	defer mu.Unlock()
	if len(written) < 3 || written[1] != "small" {
		t.Errorf("batches end with %v: the small Service waited for all of the large one", written)
	}
}

// recording is a Backend that reports changes before it writes them.
type recording struct {
	*nftables.Backend
	apply func(intent.Changes)
}

func (r recording) Apply(ctx context.Context, c intent.Changes) error {
	r.apply(c)
	return r.Backend.Apply(ctx, c)
}
