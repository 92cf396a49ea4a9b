package proxymode

import (
	"context"
	"errors"
	"fmt"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/node/dnat"
	"spillway.dev/spillway/internal/node/kernel"
)

func openEBPF(ctx context.Context, c Config) (dataplane.Backend, error) {
	cfg, err := ebpfConfig(c)
	if err != nil {
		return nil, err
	}
	return ebpf.New(ctx, cfg)
}

// firstNetns is the network namespace that the kernel starts with, since Linux
// 6.18 (NET_NS_INIT_INO, include/uapi/linux/nsfs.h). Before, it may have any number.
const firstNetns = "net:[4026531833]"

// mayDefaultCgroup returns an error if an agent must not use the root of cgroup2 by
// default, because the socket hooks would reach processes of other network
// namespaces. Only an agent in the network namespace of pid 1 (of the machine, or of
// its container) may use it. "" is a namespace that cannot be read.
func mayDefaultCgroup(own, pid1 string) error {
	const give = "the whole machine's sockets would be served: give --cgroup-root, the cgroup of the processes that are to use Services"
	switch {
	case own != "" && (own == pid1 || own == firstNetns):
		return nil
	case own == "" || pid1 == "":
		return errors.New("find cgroup2: it cannot be told whether this is the machine's network namespace (/proc/1/ns/net cannot be read), and " + give)
	}
	return errors.New("find cgroup2: this network namespace is not that of the machine, and " + give)
}

func ebpfConfig(c Config) (ebpf.Config, error) {
	root := c.CgroupRoot
	if root == "" && c.SocketHooks != ebpf.HooksOff {
		if err := mayDefaultCgroup(kernel.NetnsName("/proc/self"), kernel.NetnsName("/proc/1")); err != nil {
			return ebpf.Config{}, err
		}
		var err error
		if root, err = kernel.Cgroup2Mount(); err != nil {
			return ebpf.Config{}, fmt.Errorf("find cgroup2: %w", err)
		}
	}
	cfg := mapsConfig(c)
	cfg.CgroupRoot = root
	cfg.WatchNAT = func(changed func(bool, string)) (func(), error) {
		w, err := dnat.Watch(dnat.Config{Translated: c.Takeover.Translated}, changed)
		if err != nil {
			return nil, err
		}
		return func() { _ = w.Close() }, nil
	}
	return cfg, nil
}

// mapsConfig is the configuration without what opening looks for in the kernel: enough for the sizes
// of the maps.
func mapsConfig(c Config) ebpf.Config {
	return ebpf.Config{
		BPFFS: c.BPFFS, SocketHooks: c.SocketHooks, Bypass: c.Bypass, Log: c.Log,
		FlowTableSize: c.FlowTableSize, MaxFrontends: c.MaxFrontends, MaxEndpoints: c.MaxEndpoints, MaxSourceRanges: c.MaxSourceRanges, Timeouts: c.Timeouts,
		EndSockets: c.EndSockets, OutlierEjection: c.OutlierEjection, BalanceByLoad: c.BalanceByLoad, MaglevSeed: c.MaglevSeed, DSRKeys: c.DSRKeys, DSRPort: c.DSRPort, XDP: c.XDP, TCPLiberal: c.TCPLiberal, LeavePrevious: c.LeavePrevious, LoadAll: c.DropsCapabilities, SCTP: c.SCTP, Refused: c.Refused,
		FlowEvents: c.FlowEvents, FlowEventsSample: c.FlowEventsSample, FlowEventsRate: c.FlowEventsRate,
		ServiceMetrics: c.ServiceMetrics, ServiceMetricsTop: c.ServiceMetricsTop,
	}
}

// FitMaps sets the sizes of eBPF's maps that are 0, and returns the kernel memory of the maps at
// start: see ebpf.Config.Fit. Both are in bytes.
func (c *Config) FitMaps(memory uint64, flows uint32) (bytes uint64, err error) {
	m := mapsConfig(*c)
	if bytes, err = m.Fit(memory, flows); err != nil {
		return 0, err
	}
	c.FlowTableSize, c.MaxFrontends, c.MaxEndpoints = m.FlowTableSize, m.MaxFrontends, m.MaxEndpoints
	return bytes, nil
}
