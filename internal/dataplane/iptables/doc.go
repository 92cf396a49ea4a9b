// Package iptables is the dataplane that serves Services with rules of iptables,
// legacy or nft, beside the rules of other programs. Only the first packet of a
// connection traverses them; conntrack translates the others as it did the first.
//
//	from a device            process of the node
//	nat PREROUTING           nat OUTPUT
//	      └───────────┬────────────┘
//	            SPW-SERVICES
//	                  ├─ SPW-SOURCES    not from the cluster: mark 0x4000 (masquerade)
//	                  ├─ SPW-ADDRESSES  -d 10.96.0.0/18 ─> … ─> -d 10.96.0.1/32 --dport 80 ─┐
//	                  ├─ SPW-NODEPORTS  at the node's addresses: --dport 30000:30063 ─> …  ─┤
//	                  └─ no Service's: mark 0x4000 off, and on its way                      │
//	                                                                                        │
//	      ┌──────────────┬───────────────────────┬─────────────────────────────┬────────────┘
//	  cluster IP    NodePort, external IP,   source ranges: SPW-FW-…      no endpoint
//	      │         load balancer: SPW-EXT-… <───┘     │ others         SPW-REJECT: mark 0x1000
//	      │              │ policy Cluster: mark        └─> SPW-DROP: mark 0x5000
//	      │              │ policy Local, none here: ─────> SPW-DROP        │
//	      ├──────────────┤                                  filter INPUT, FORWARD, OUTPUT
//	  SPW-SVC-…      SPW-LOC-…                              SPW-REFUSE: DROP, or REJECT with
//	      └───────┬──────┘                                  RST or port unreachable
//	              │ one endpoint of n
//	      ┌───────┴──────┐
//	      │          SPW-EP-…  affinity: remembers the client (xt_recent);
//	      │              │     a pod of this node that asks itself: mark 0x4000
//	     DNAT           DNAT
//	      └───────┬──────┘
//	     filter FORWARD, SPW-FORWARD: INVALID RSTs are dropped, Services' packets accepted
//	              │
//	     nat POSTROUTING, mark 0x4000: SPW-MASQUERADE, MASQUERADE --random-fully
//	       no Service's, while intent.Node.Egress has sources: SPW-EGRESS, the same for
//	       pods' connections to the outside
//
// Both dispatches are trees of chains (see trie.go). The path to a Service has some
// twenty rules, however many Services exist. A new or deleted Service rewrites one chain
// of at most 16 rules. An endpoint is one rule in the chain of its Service. That keeps
// the table small: iptables-legacy copies it out of the kernel and back at every change.
//
// # Syncs
//
// A partial sync (Apply) passes the changed chains to iptables-restore --noflush. It also
// checks the jumps in table nat. If anything fails, a full sync follows at once. A full
// sync (Replace) compares iptables-save with the desired rules, chain by chain, as text,
// and writes the chains that differ. It reads nothing if a fingerprint of the tables
// equals that of the last good comparison. After any sequence of partial syncs the kernel
// holds the rules that one full sync writes.
//
// # Names
//
// All chains begin with SPW-. Chains of a Service port end in a hash of its name. The
// rules that jump to them contain the name:
//
//	iptables-save -t nat | grep default/web:http
//
// IPv6 has the same chains in ip6tables.
package iptables
