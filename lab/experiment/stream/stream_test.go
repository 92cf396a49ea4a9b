package stream

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/test/testbed/controlplane"
)

func TestReport(t *testing.T) {
	r := Report{
		Machine:  experiment.Machine{Kernel: "6.18.0", Arch: "x86_64", CPU: "Test", Cores: 2, Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)},
		Services: 5000, Endpoints: Endpoints, Rate: 200, Seconds: 60,
		Rows: []Row{
			{Mode: "ebpf", Changes: 12000, Millis: []float64{4, 1, 3, 2}, API: []float64{1, 2}, Told: []float64{1, 0.5}, Rest: []float64{3, 0.5},
				Settled: true, CPU: 1.5, RSS: 60, Peak: 80},
			{Mode: "kube-proxy-nftables", Changes: 11990, Lost: 1, Skipped: 2},
		},
	}
	clitest.Pages(t, "report", &r)
}

func TestTheEndIsComparedBothWays(t *testing.T) {
	missing, surplus := differences(map[string]bool{"10.0.0.1": true, "10.0.0.2": true}, map[string]bool{"10.0.0.2": true, "10.0.0.3": true})
	if !slices.Equal(missing, []string{"10.0.0.1"}) || !slices.Equal(surplus, []string{"10.0.0.3"}) {
		t.Errorf("missing %q, surplus %q", missing, surplus)
	}
}

// The test must find every endpoint of the large Service in a listing, and no address of
// the lab.
func TestEndpointsAreToldFromOtherAddresses(t *testing.T) {
	crowd := controlplane.Crowd{Services: 50000, Endpoints: Endpoints, First: netip.MustParseAddr("10.0.0.1")}
	last := crowd.Slice(49999).Endpoints[Endpoints-1].Addresses[0]
	listing := "elements = { 10.0.0.1 . 8080, 10.244.0.2 . 80, 10.96.0.10 . tcp . 80, 172.30.0.10, " + last + " . 8080 }"
	if got := inTable.FindAllString(listing, -1); !slices.Equal(got, []string{"10.0.0.1", last}) {
		t.Errorf("found %q, want 10.0.0.1 and %s", got, last)
	}
}
