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
//	BPFFS/maps-v3/NAME    maps of ABI version 3
//	BPFFS/links/…         tcx links, one for each interface and direction
//	BPFFS/cgroup/…        links of the socket hooks
//
// The files, by theme:
//
//	backend, config, metrics     the Backend: Apply and Replace, its settings, its metrics
//	load, drain, cleanup, pins_  programs and pins, from the start to the removal
//	sizes, loads                 sizes of maps by the node's memory; load of endpoints
//	abi                          Go values to and from those of bpf/abi.h
//	ports                        the maps of Services: which ports to add and to remove
//	ports_write                  one port's entries, in the order that the programs need
//	ports_endpointaddrs          the endpoints' own addresses among the frontends
//	ports_readback, ports_check  the same maps read at start, and compared after writes
//	node_                        settings, source ports, pods and addresses of the node
//	untracked                    the maps of do-not-track policies
//	directreplies, directcarriers, dsrprobe/
//	                             DSR: which Services use it, by an option or a datagram
//	flows_                       sweep of the flow table, count of each client's flows
//	events                       flow events: ring, open flows, ends that the sweep finds
//	outcomes                     answered and unanswered handshakes, for outlier ejection
//	sockets_end                  ends sockets whose endpoint is gone
//	services, service_counters   Service ports by id, and their counters
//	inspect, view, dryrun, dump  read only: what commands and the API show
//	migrate_, layout2/           entries of maps with another layout or size, also back to
//	                             the objects of the previous release
//	packet_…_test                single packets through the programs (BPF_PROG_RUN)
package ebpf
