// Package node groups the packages about the node's kernel and its programs. All but stale
// know nothing of Services:
//
//	kernel        features, sysctls, addresses, mounts, network namespaces, IPsec
//	  netnstest   runs tests in network namespaces
//	nft           reads and writes nf_tables
//	iptablessave  reads iptables-save
//	conntrack     the kernel's connection tracking: entries, counters, metrics
//	  autopilot   adjusts its sizes and timeouts
//	  stale       deletes entries that a change of Services has made stale
//	capacity      calculates conntrack's limits
//	ruleset       reads rules as the programs list them, and answers questions about them
//	masquerade    follows where rules masquerade pods
//	dnat          detects destination NAT by other programs
//	kubeproxy     finds and removes the rules of kube-proxy
//	takeover      replaces kube-proxy without a gap
//	instance      lets one agent run on a node
package node
