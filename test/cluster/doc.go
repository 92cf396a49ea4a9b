// Package cluster runs a real Kubernetes cluster of several nodes on one machine. Each
// node is a network namespace with a containerd, a kubelet and cgroups of its own.
//
//	c, err := cluster.Up(ctx, cluster.Config{Name: "k8s"})
//	defer c.Down()
//	out, err := c.Kubectl(ctx, "get", "nodes")
//
// docs/contributing/real-clusters.md describes the nodes. The command in cmd/cluster starts a
// cluster that outlives it.
package cluster
