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
// layout that both sides share. Backend wires the packages below this folder, which do not know
// each other (docs/adr/0058-rooms-of-the-ebpf-dataplane.md). The comment of package dataplane lists
// them.
//
// The agent pins all kernel objects under Config.BPFFS, so that they serve while no
// agent runs:
//
//	BPFFS/maps-v3/NAME    maps of ABI version 3
//	BPFFS/links/…         tcx links, one for each interface and direction
//	BPFFS/tailcalls/ID    the program behind the others, in an array
//	BPFFS/cgroup/…        links of the socket hooks
//
// The files, by theme:
//
//	backend, config, attach      the Backend: Apply and Replace, its settings, its hooks
//	donottrack                   policies, by the part of that name
//	inspect, dsr, egress         what it shows, by the parts
//	metrics                      its metrics
//	packet_…_test                single packets through the programs (BPF_PROG_RUN)
package ebpf
