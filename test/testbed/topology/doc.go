// Package topology builds a cluster like Kubernetes' on one machine. It has a LAN,
// outside clients, nodes and pods, each a network namespace with a cgroup of its own. It
// changes nothing in the namespace of the caller.
//
//	 spw-x-client0      spw-x-node0                       spw-x-node1
//	┌────────────┐  ┌──────────────────────────────┐  ┌──────────────┐
//	│    eth0    │  │ eth0    cni0 ─┬─ veth0  veth1 │  │ eth0  cni0 … │
//	└─────┬──────┘  └──┬─────────────────┬──────┬──┘  └──┬───────────┘
//	      │            │               eth0   eth0       │
//	      │            │      spw-x-node0-pod0  -pod1    │
//	   client0       node0                             node1
//	┌─────┴────────────┴─────────────────────────────────┴──┐
//	│ br0                                         spw-x-lan │
//	└───────────────────────────────────────────────────────┘
//
// The state of a cluster is in /run/spillway-lab/NAME. It is written before anything is
// created, so that any process can find the cluster and remove it.
package topology
