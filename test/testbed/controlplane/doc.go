// Package controlplane runs a Kubernetes control plane for the lab and for tests:
// Debian's etcd, and kube-apiserver and kube-controller-manager as hack/peers builds
// them. They are the real programs with real certificates. They listen only on free ports
// of loopback, or on the addresses of one host of a lab cluster.
//
//	cp, err := controlplane.Up(ctx, controlplane.Config{Dir: dir})
//	defer cp.Down()
//	client := kubernetes.NewForConfigOrDie(cp.REST())
//
// Processes end with Down. The kernel ends them if the program that started them dies
// first. Only the directory remains.
package controlplane
