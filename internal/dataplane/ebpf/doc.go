// Package ebpf is the dataplane that keeps Service packets away from netfilter:
// sockets are translated when they connect, packets by programs at the tc hooks
// of the node's interfaces, with a flow table of their own.
//
//	client on another machine                        pod on this node
//	       │                                                │
//	       ▼ eth0                                           ▲ eth0
//	from_network ── flow? Service? ── rewrite ── redirect_peer
//	to_network  ◄── redirect_neigh ── rewrite ── flow? ── from_pod
//	       ▲                                                │
//	       └── an endpoint elsewhere: the same, with SNAT ──┘
//
//	process ── connect(Service) ── cgroup/connect4 ──► endpoint
//
// The programs are in the folder bpf at the top of the repository; abi.h there
// is the layout that both sides share. This package loads them, writes the maps
// and sweeps the flow table; package attach puts the programs at their hooks.
//
// Everything the kernel needs is pinned under Config.BPFFS, so that it serves on
// while no agent runs:
//
//	BPFFS/maps-v1/NAME    maps of ABI version 1
//	BPFFS/links/…         tcx links, one an interface and direction
//	BPFFS/cgroup/…        links of the socket hooks
package ebpf
