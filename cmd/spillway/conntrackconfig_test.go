package main

import (
	"runtime"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf"
)

func TestConntrackFlagsSizeTheFlowTable(t *testing.T) {
	for _, c := range []struct {
		cfg  conntrackConfig
		want uint64
	}{
		{conntrackConfig{MaxPerCore: 0, Min: 5}, 0},
		{conntrackConfig{MaxPerCore: 1000, Min: 1 << 20}, 1 << 20},
		{conntrackConfig{MaxPerCore: 1, Min: 1}, minFlows},
		{conntrackConfig{MaxPerCore: 1 << 20, Min: 5}, uint64(runtime.NumCPU()) << 20},
	} {
		if got := c.cfg.flows(); got != c.want {
			t.Errorf("%+v: %d flows, want %d", c.cfg, got, c.want)
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
