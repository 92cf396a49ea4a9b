package server

import (
	"context"
	"errors"
	"strings"
	"testing"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/diagnosis/doctor"
)

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
			!strings.Contains(resp.Findings[0].Title, "only-clients") ||
			resp.Findings[0].Commands[1] != "kubectl edit donottrackpolicy only-clients"):
			t.Errorf("found %v", resp)
		}
	}
}
