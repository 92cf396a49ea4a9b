// Package node groups the packages about the node's kernel that do not depend on
// Services:
//
//	kernel      features, sysctls, addresses, mounts, network namespaces, IPsec
//	nft         reads and writes nf_tables
//	conntrack   the kernel's connection tracking: entries, counters, metrics
//	  autopilot   adjusts its sizes and timeouts
//	  stale       deletes entries that a change has made stale
//	capacity    calculates conntrack's limits
//	kubeproxy   finds and removes the rules of kube-proxy
//	dnat        detects destination NAT by other programs
package node
