// Package node holds what is known of the node's kernel beside Services:
//
//	kernel      features, sysctls, addresses, mounts, network namespaces, IPsec
//	conntrack   the kernel's connection tracking: entries, counters, metrics
//	  autopilot   keeps its sizes and timeouts right
//	  stale       deletes entries that a change has made wrong
//	capacity    the arithmetic of conntrack's limits
//	kubeproxy   finds and removes what kube-proxy left
//	dnat        watches other programs' address translation
package node
