package main

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf"
)

func TestConntrackFlagsSizeTheFlowTable(t *testing.T) {
	for _, c := range []struct {
		cfg  conntrackConfig
		want uint64
	}{
		{conntrackConfig{MaxPerCore: 0, Min: 5}, ebpf.DefaultFlowTableSize},
		{conntrackConfig{MaxPerCore: 1000, Min: 1 << 20}, 1 << 20},
		{conntrackConfig{MaxPerCore: 1, Min: 1}, minFlows},
		{conntrackConfig{MaxPerCore: 1, Min: minFlows}, minFlows},
		{conntrackConfig{MaxPerCore: 1 << 20, Min: 5}, uint64(runtime.NumCPU()) << 20},
	} {
		if got := c.cfg.flows(); got != c.want {
			t.Errorf("%+v: %d flows, want %d", c.cfg, got, c.want)
		}
		if raised, says := c.cfg.Min == 1, c.cfg.remark(); raised != strings.Contains(says, "it has 4096") || !raised && says != "" {
			t.Errorf("%+v: the log says %q", c.cfg, says)
		}
	}
}

func TestConntrackFlagsSetTimeouts(t *testing.T) {
	c := conntrackConfig{UDP: 3 * time.Second, TCPEstablished: time.Hour}
	want := ebpf.DefaultTimeouts
	want.UDPNew, want.TCPEstablished = 3*time.Second, time.Hour
	if got := c.timeouts(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	c.UDPStream = time.Millisecond
	if err := c.validate(); err == nil {
		t.Error("a time-out below a second was taken")
	}
}
