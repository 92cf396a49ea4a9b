package trace

import (
	"bytes"
	"strings"
	"testing"
)

func TestTheServiceComesFirst(t *testing.T) {
	var out bytes.Buffer
	if err := (&Report{Service: "shop/cart:http", Source: "10.0.0.1"}).Write(&out); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out.String(), "Service           shop/cart:http\nconnection ") {
		t.Errorf("printed\n%s", &out)
	}
}

func TestFailures(t *testing.T) {
	for want, r := range map[string]Report{
		"":                                   {Decision: "to 10.1.0.1:80", Probe: &Probe{Result: "connected"}},
		"rejected":                           {Decision: "rejected", Refused: true},
		"the probe failed: timeout: dropped": {Probe: &Probe{Result: "timeout", Conclusion: "dropped"}},
	} {
		if got := r.Failure(); got != want {
			t.Errorf("%+v: %q, want %q", r, got, want)
		}
	}
	if got := (&Report{Probe: &Probe{Skipped: "not here"}}).Failure(); got != "" {
		t.Errorf("without a probe: %q", got)
	}
}
