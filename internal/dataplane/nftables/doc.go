// Package nftables is the dataplane that serves Services with nftables: one
// table of family inet, for IPv4 and IPv6, TCP, UDP and SCTP.
//
// Rules see the first packet of a connection; conntrack knows the rest. The path of an IPv4
// packet (IPv6 has the same with a 6 in the names):
//
//	from the wire, from pods        the node's own processes
//	     prerouting (dstnat)             output (-100)
//	          └──────────────┬───────────────┘
//	  address . protocol . port in services4? ──────────────> chain services4
//	  address in nodeport-addrs4, rest in nodeports4? ──────> chain nodeports4
//	  address in cluster-ips4? ─────────────────────────────> chain refuse
//	  none of it: not ours
//
//	services4, nodeports4 (sets and rules are there only while something is in them):
//	  in services4-counters                                      count, and go on
//	  in services4-ranges, but source not in services4-sources   drop
//	  in services4-outside, and from another machine             go on in services4-outside
//	                                                             with the endpoints for those
//	  in services4-affinity-10800s, and the client in clients4   dnat to its endpoint, if that
//	                                                             is still in services4-affinity
//	  services4-1              dnat to the only endpoint
//	  in services4-upto-16     draw a slot, dnat to what services4-16 has in it;
//	                           draw again if it is empty (likewise for 4, 64, 256, ...)
//	  in services4-drop        drop
//	  else                     refuse: RST, or ICMP port unreachable
//
//	announced (prerouting, mangle; announced-here in output), while FTP is served:
//	  a helper expected it, but its port is not the announcer's   drop; see helper.go
//
//	handshakes (before postrouting; handshakes-here for what is for the node itself), answers
//	(prerouting, mangle; answers-here in output), while endpoints may be ejected:
//	  to an endpoint in handshakes4, or SYN-ACK or RST of one    count; see handshakes.go
//
//	forward: RSTs that conntrack finds invalid   drop; see ruleset.forward
//
//	remember (srcnat - 1; remember-here for what is for the node itself):
//	  client asked for what is in services4-affinity-10800s       note in clients4 where it went
//
//	egress (srcnat - 6), while intent.Node.Egress has sources:
//	  not translated, source in egress-sources4 and
//	  destination not in egress-keep4                             masquerade fully-random; see egress.go
//
//	postrouting (srcnat): what was translated by a dnat -> chain own-address
//	  source . destination in hairpin4                            ┐
//	  client asked for what is in services4-masquerade            │ masquerade
//	  client is a process of the node                             │ fully-random
//	  client is none of this node's pods                          ┘
//
// # Why no chain for each Service
//
// What a commit costs must follow the change. The kernel looks at every chain of
// every table in every commit, and validates a verdict map as a whole when a
// goto is added: with one chain and one verdict map element a Service, adding one
// took 14 ms among 50,000 and 2 ms among 1,000 (Linux 6.18). Elements of maps
// that hold data cost the same in any table. So a Service port is elements
// alone, and chains are few and fixed: see affinity.go for session affinity.
//
// What nft cannot write is not used: it cannot read a number of slots from one
// map and draw among so many, hence maps of a few sizes in which some slots are
// empty. The one thing that nft shows and does not read back is "ct original
// proto-dst" in a concatenation.
//
// # Writing
//
//	intent.Changes ──> render old and new port ──> difference ──> one batch ──> kernel
//
// The agent keeps ports and a few numbers, no elements: it renders them again when it needs
// them. Package nft encodes the batch, orders its changes and sends it; the kernel carries out
// all of it or nothing. The generation of nf_tables shows at no cost whether another program
// has written since. Then the agent reads the table and compares it.
package nftables
