// Package flows is the one table of required Service behavior on all dataplanes:
// which client may reach which address, which server answers, and which source
// address that server sees. The cases are data (Cases); the tests of this package
// run all of them with real sockets between the network namespaces of a small
// cluster, against one dataplane:
//
//	go test ./test/flows -proxy-mode ebpf
//
// The cluster, with the short names that cases use:
//
//	client0 client1            outside, on the same LAN as the nodes
//	a  b  c                    nodes; a and c are in zone east, b in zone west
//	a0 a1 a2 a3  b0 … c3       pods (the digit 3 is left to NetworkPolicy cases)
//	a/host  b/host  c/host     pods in the network namespace of their node
//	a0/vm …                    processes in a pod's network namespace but outside
//	                           the cluster's cgroups, as a VM's packets would come
//
// See README.md for how to add a case.
package flows
