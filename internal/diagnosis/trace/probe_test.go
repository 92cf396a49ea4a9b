package trace

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/diagnosis/drops"
)

// reports are drops as the kernel reports them, each after the time that it takes to read.
type reports struct {
	after []time.Duration
	drops []drops.Drop
}

func (r *reports) next(ctx context.Context) (drops.Drop, error) {
	wait := time.Hour // nothing more is dropped
	if len(r.drops) > 0 {
		wait = r.after[0]
	}
	select {
	case <-ctx.Done():
		return drops.Drop{}, ctx.Err()
	case <-time.After(wait):
	}
	d := r.drops[0]
	r.after, r.drops = r.after[1:], r.drops[1:]
	return d, nil
}

func TestReadDrops(t *testing.T) {
	const slow = dropsPatience - time.Millisecond
	drop := func(reason string, age time.Duration) drops.Drop {
		return drops.Drop{Reason: reason, Time: time.Now().Add(-age)}
	}
	for _, c := range []struct {
		name  string
		after []time.Duration
		drops func() []drops.Drop
		want  []string
	}{
		{name: "none", drops: func() []drops.Drop { return nil }},
		{
			name: "that take long to read", after: []time.Duration{slow, slow, slow},
			drops: func() []drops.Drop { return []drops.Drop{drop("a", 2), drop("b", 1), drop("c", 0)} },
			want:  []string{"a", "b", "c"},
		},
		{
			name: "one of a kind", after: []time.Duration{0, 0, 0},
			drops: func() []drops.Drop { return []drops.Drop{drop("a", 2), drop("a", 1), drop("b", 0)} },
			want:  []string{"a", "b"},
		},
		{
			name: "long after the result", after: []time.Duration{0},
			drops: func() []drops.Drop { return []drops.Drop{drop("a", -2*dropsPatience)} },
		},
		{
			name: "after silence", after: []time.Duration{2 * dropsPatience},
			drops: func() []drops.Drop { return []drops.Drop{drop("a", 0)} },
		},
		{
			name: "more than are reported", after: make([]time.Duration, mostDrops+1),
			drops: func() (all []drops.Drop) {
				for _, reason := range []string{"a", "b", "c", "d", "e"} {
					all = append(all, drop(reason, 0))
				}
				return all
			},
			want: []string{"a", "b", "c", "d"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &reports{after: c.after, drops: c.drops()}
				var got []string
				for _, d := range readDrops(t.Context(), dropsPatience, r.next) {
					got = append(got, d.Reason)
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("read %q, want %q", got, c.want)
				}
			})
		})
	}
}
