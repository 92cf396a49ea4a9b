// Package cluster runs a real Kubernetes cluster of several nodes on one machine. Each
// node is a network namespace with a containerd, a kubelet and cgroups of its own.
package cluster

import _ "spillway.dev/spillway/lab/topology"
