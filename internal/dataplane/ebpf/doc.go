// Package ebpf is the dataplane that keeps Service packets away from netfilter. The
// socket hooks translate when a process connects, and the programs at the tc hooks of
// the node's interfaces translate packets, with their own flow table.
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
// The programs are in the folder bpf at the top of the repository. Its abi.h is the
// layout that both sides share. This package loads the programs, writes the maps and
// sweeps the flow table. Package attach attaches the programs to their hooks.
//
// The agent pins all kernel objects under Config.BPFFS, so that they serve while no
// agent runs:
//
//	BPFFS/maps-v2/NAME    maps of ABI version 2
//	BPFFS/links/…         tcx links, one for each interface and direction
//	BPFFS/cgroup/…        links of the socket hooks
package ebpf
