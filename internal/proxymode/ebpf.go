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
		return errors.New("find cgroup2: it cannot be told whether this is the machine's network namespace (/proc/1/ns/net cannot be read), " +
			"and " + give)
	}
	return errors.New("find cgroup2: this network namespace is not that of the machine, and " + give)
}

func ebpfConfig(c Config) (ebpf.Config, error) {
	cfg := c.ebpf()
	if cfg.CgroupRoot == "" && cfg.SocketHooks != ebpf.HooksOff {
		if err := mayDefaultCgroup(kernel.NetnsName("/proc/self"), kernel.NetnsName("/proc/1")); err != nil {
			return ebpf.Config{}, err
		}
		var err error
		if cfg.CgroupRoot, err = kernel.Cgroup2Mount(); err != nil {
			return ebpf.Config{}, fmt.Errorf("find cgroup2: %w", err)
		}
	}
	cfg.WatchNAT = func(changed func(bool, string)) (func(), error) {
		w, err := dnat.Watch(dnat.Config{Translated: c.Takeover.Translated}, changed)
		if err != nil {
			return nil, err
		}
		return func() { _ = w.Close() }, nil
	}
	return cfg, nil
}
