package intent

import (
	"fmt"
	"testing"
)

// Sockets of these endpoints continue, although no new flow gets them.
func TestEndpointsLinger(t *testing.T) {
	slice := sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there, draining), at("10.1.0.3", there, gone), at("10.1.0.4", there, notReady))
	for _, c := range []struct {
		on   bool
		want string
	}{{true, "[10.1.0.2:8080 10.1.0.3:8080]"}, {false, "[]"}} {
		tr := New(Config{NodeName: here, Lingering: c.on})
		tr.Apply(whole(delta(web(), slice)))
		if got := fmt.Sprint(tr.State().Ports[0].Lingering); got != c.want {
			t.Errorf("with %v: %s lingers, want %s", c.on, got, c.want)
		}
	}
	tr := New(Config{NodeName: here, Lingering: true})
	tr.Apply(whole(delta(web(), slice)))
	c := tr.Apply(delta(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there, draining), at("10.1.0.4", there, notReady))))
	if len(c.Upserts) != 1 || len(c.Upserts[0].Lingering) != 1 {
		t.Errorf("an endpoint that lingered is gone: %d ports changed, want 1 without it", len(c.Upserts))
	}
}
