package server

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/diagnosis/doctor"
)

// TestDenialsCountFromTheFirstReading: neither what the kernel counted before the agent nor
// what is older than a minute is a denial of now.
func TestDenialsCountFromTheFirstReading(t *testing.T) {
	var d denials
	began := time.Now()
	for _, row := range []struct {
		after   time.Duration
		packets map[string]uint64
		want    []doctor.Denial
	}{
		{0, map[string]uint64{"old": 1000}, nil},
		{10 * time.Second, map[string]uint64{"old": 1000, "late": 7}, nil},
		{20 * time.Second, map[string]uint64{"old": 1003, "late": 9, "silent": 0}, []doctor.Denial{{Policy: "late", Packets: 2, Window: 10 * time.Second}, {Policy: "old", Packets: 3, Window: 20 * time.Second}}},
		{65 * time.Second, map[string]uint64{"late": 9}, []doctor.Denial{{Policy: "late", Packets: 2, Window: 55 * time.Second}}},
		{85 * time.Second, map[string]uint64{"late": 9}, nil},
		{86 * time.Second, map[string]uint64{"late": 1}, nil}, // it was deleted and made again
	} {
		if got := d.add(denialReading{began.Add(row.after), row.packets}); !slices.Equal(got, row.want) {
			t.Errorf("after %v: %v, want %v", row.after, got, row.want)
		}
	}
	if n := len(d.readings); n > 4 {
		t.Errorf("%d readings of 86 s in memory", n)
	}
}

// fakeDenials counts one more packet in each reading.
type fakeDenials struct {
	n   uint64
	err error
}

func (f *fakeDenials) Denials(context.Context) (map[string]uint64, error) {
	f.n++
	return map[string]uint64{"only-clients": f.n}, f.err
}

func TestAPolicyThatDeniesIsFound(t *testing.T) {
	for _, failure := range []error{nil, errors.New("no buffer space")} {
		h := start(t, func(c *Config) {
			c.State, c.Denials = &fakeState{}, &fakeDenials{err: failure}
			c.examine = func(context.Context) (*doctor.Node, error) { return &doctor.Node{}, nil }
		}).wait(t)
		if _, err := h.denied(t.Context()); !errors.Is(err, failure) { // the first reading, if no other was
			t.Fatal(err)
		}
		resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
		switch {
		case err != nil:
			t.Fatal(err)
		case failure != nil && (len(resp.Findings) > 0 || len(resp.Problems) != 1 || !strings.Contains(resp.Problems[0].What, failure.Error())):
			t.Errorf("found %v", resp)
		case failure == nil && (len(resp.Findings) != 1 || resp.Findings[0].Id != "policy-denies" || resp.Findings[0].Severity != "info" ||
			!strings.Contains(resp.Findings[0].Title, "only-clients") || resp.Findings[0].Commands[1] != "kubectl edit donottrackpolicy only-clients"):
			t.Errorf("found %v", resp)
		}
	}
}
