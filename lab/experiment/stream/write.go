package stream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"
)

// writers is the maximum number of concurrent requests to the API server. All changes of
// one Service go to the same writer, one after the other.
const writers = 16

// change is an EndpointSlice to write, and the probe that waits for it.
type change struct {
	slice *discoveryv1.EndpointSlice
	probe *probe
	ready bool
}

// results collects the durations of single changes.
type results struct {
	mu  sync.Mutex
	row *Row
}

func (r *results) add(add func(*Row)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	add(r.row)
}

// write makes the changes, at even intervals, and waits for the probes among them.
func (b *bench) write(ctx context.Context, probes []*probe, w *watcher, row *Row) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := &results{row: row}
	var all sync.WaitGroup
	queues := make([]chan change, writers)
	for i := range queues {
		queues[i] = make(chan change, b.cfg.Rate) // a second of an API server that is slow
		all.Go(func() {
			for c := range queues[i] {
				if err := b.writeOne(ctx, c, w, r, &all); err != nil {
					cancel(err)
				}
			}
		})
	}
	b.schedule(ctx, probes, queues, r)
	for _, q := range queues {
		close(q)
	}
	all.Wait()
	return context.Cause(ctx)
}

// schedule sends the changes to the writers' queues.
func (b *bench) schedule(ctx context.Context, probes []*probe, queues []chan change, r *results) {
	every := b.cfg.Rate / b.cfg.Probes
	start, gap := time.Now(), time.Second/time.Duration(b.cfg.Rate)
	for n := 0; time.Since(start) < b.cfg.Duration && ctx.Err() == nil; n++ {
		time.Sleep(time.Until(start.Add(time.Duration(n) * gap)))
		if n%every == 0 {
			i := n / every % len(probes)
			p := probes[i]
			select {
			case p.busy <- struct{}{}:
				queues[i%writers] <- change{slice: p.set(!p.ready), probe: p, ready: p.ready}
			default:
				r.add(func(row *Row) { row.Skipped++ })
			}
			continue
		}
		i := rand.IntN(b.cfg.Services)
		b.unready[i] = !b.unready[i]
		s := b.crowd.Slice(i)
		s.Endpoints[0].Conditions.Ready = ptr.To(!b.unready[i])
		queues[i%writers] <- change{slice: s}
	}
}

func (b *bench) writeOne(ctx context.Context, c change, w *watcher, r *results, all *sync.WaitGroup) error {
	if ctx.Err() != nil {
		return nil
	}
	start := time.Now()
	version := make(chan string, 1) // of the API server for the change; closed if there is none
	defer close(version)
	if c.probe != nil {
		all.Go(func() {
			err := c.probe.await(ctx, c.ready, patience)
			seen := time.Now()
			<-c.probe.busy
			if errors.Is(err, errLost) {
				r.add(func(row *Row) { row.Lost++ })
			}
			if v, ok := <-version; ok && err == nil {
				told, err := w.at(ctx, v)
				if err == nil {
					r.add(func(row *Row) { row.note(start, told, seen) })
				}
			}
		})
	}
	v, err := b.update(ctx, c.slice)
	if err != nil {
		return err
	}
	version <- v
	r.add(func(row *Row) {
		row.Changes++
		row.API = append(row.API, millis(time.Since(start)))
	})
	return nil
}

// note records the times of one probe.
func (row *Row) note(start, told, seen time.Time) {
	row.Millis = append(row.Millis, millis(seen.Sub(start)))
	row.Told = append(row.Told, millis(told.Sub(start)))
	row.Rest = append(row.Rest, millis(seen.Sub(told)))
}

func millis(d time.Duration) float64 { return d.Seconds() * 1e3 }

// settle waits until the kernel has exactly the endpoints that were written last.
func (b *bench) settle(ctx context.Context, p *proxy, row *Row) error {
	want := map[string]bool{}
	for i := range b.cfg.Services {
		for k, ep := range b.crowd.Slice(i).Endpoints {
			if k > 0 || !b.unready[i] {
				want[ep.Addresses[0]] = true
			}
		}
	}
	var missing, surplus []string
	for deadline := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
		have, err := p.endpoints(ctx)
		if err != nil {
			return err
		}
		missing, surplus = differences(want, have)
		if len(missing)+len(surplus) == 0 {
			row.Settled = true
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%v after the last change the kernel lacks the endpoints %.200q and has %.200q", patience, missing, surplus)
		}
	}
}

func differences(want, have map[string]bool) (missing, surplus []string) {
	for a := range want {
		if !have[a] {
			missing = append(missing, a)
		}
	}
	for a := range have {
		if !want[a] {
			surplus = append(surplus, a)
		}
	}
	return missing, surplus
}
