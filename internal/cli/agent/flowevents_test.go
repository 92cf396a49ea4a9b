package agent

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestFlowEventsFlags(t *testing.T) {
	tests := []struct {
		args             string
		counted, packets bool
		top              int
		err              string
	}{
		{args: "", counted: true, top: 100},
		{args: "--flow-events=all --flow-events-sample=10 --flow-events-rate=0 --service-metrics=off"},
		{args: "--flow-events=on-demand --service-metrics=connections", counted: true, top: 100},
		{args: "--service-metrics=all", counted: true, packets: true},
		{args: "--service-metrics=top-7", counted: true, packets: true, top: 7},
		{args: "--flow-events=some", err: `--flow-events "some": not a choice`},
		{args: "--flow-events-sample=0 --service-metrics=off"},
		{args: "--flow-events-rate=1000001", err: "--flow-events-rate 1000001: must be at most 1000000"},
		{args: "--service-metrics=top", err: `--service-metrics "top": not a choice`},
		{args: "--service-metrics=top-0", err: `--service-metrics "top-0": no number`},
		{args: "--service-metrics=top-x", err: `--service-metrics "top-x": no number`},
	}
	for _, tt := range tests {
		var c Config
		flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		c.AddFlags(flags)
		if err := flags.Parse(strings.Fields(tt.args)); err != nil {
			t.Fatal(err)
		}
		err := errors.Join(c.validateChoices(), c.validateEvents())
		if tt.err == "" {
			if err != nil || c.EBPF.ServiceMetrics != tt.counted || (c.EBPF.ServiceMetrics && !c.EBPF.ServiceConnectionsOnly) != tt.packets ||
				c.EBPF.ServiceMetricsTop != tt.top {
				t.Errorf("%q: %+v, error %v", tt.args, c, err)
			}
			continue
		}
		if err == nil || !strings.HasPrefix(err.Error(), tt.err) {
			t.Errorf("%q: error %v, want %s", tt.args, err, tt.err)
		}
	}
}
