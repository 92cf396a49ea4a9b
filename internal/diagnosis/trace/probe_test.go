package trace

import (
	"context"
	"net/netip"
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

// TestReadDrops reads the drops of a connection among those of the machine's other packets.
func TestReadDrops(t *testing.T) {
	const slow = dropsPatience - time.Millisecond
	ours := netip.MustParseAddr("10.0.0.1")
	drop := func(client netip.Addr, reason string, age time.Duration) drops.Drop {
		d := drops.Drop{Reason: reason, Time: time.Now().Add(-age)}
		d.Source = client
		return d
	}
	foreign := func(age time.Duration) drops.Drop { return drop(netip.MustParseAddr("10.0.0.2"), "theirs", age) }
	for _, c := range []struct {
		name  string
		after []time.Duration
		drops func() []drops.Drop
		want  []string
	}{
		{name: "none", drops: func() []drops.Drop { return nil }},
		{
			name: "behind others that take long to read", after: []time.Duration{slow, slow, slow, 0},
			drops: func() []drops.Drop {
				return []drops.Drop{foreign(3), foreign(2), foreign(1), drop(ours, "a", 0)}
			},
			want: []string{"a"},
		},
		{
			name: "one of a kind", after: []time.Duration{0, 0, 0},
			drops: func() []drops.Drop {
				return []drops.Drop{drop(ours, "a", 2), drop(ours, "a", 1), drop(ours, "b", 0)}
			},
			want: []string{"a", "b"},
		},
		{
			name: "long after the result", after: []time.Duration{0, 0},
			drops: func() []drops.Drop {
				return []drops.Drop{foreign(-2 * dropsPatience), drop(ours, "a", -2*dropsPatience)}
			},
		},
		{
			name: "after silence", after: []time.Duration{2 * dropsPatience},
			drops: func() []drops.Drop { return []drops.Drop{drop(ours, "a", 0)} },
		},
		{
			name: "more than are reported", after: make([]time.Duration, mostDrops+1),
			drops: func() (all []drops.Drop) {
				for _, reason := range []string{"a", "b", "c", "d", "e"} {
					all = append(all, drop(ours, reason, 0))
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
				for _, d := range readDrops(t.Context(), dropsPatience, r.next, func(d *drops.Drop) bool { return d.Source == ours }) {
					got = append(got, d.Reason)
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("read %q, want %q", got, c.want)
				}
			})
		})
	}
}
