// Package controlplane runs a Kubernetes control plane for the lab and for
// tests: Debian's etcd, and kube-apiserver and kube-controller-manager as
// hack/peers builds them. They are the real programs with real certificates;
// only what they listen on is small: free ports of loopback, or the addresses
// of one host of a lab cluster.
//
//	cp, err := controlplane.Up(ctx, controlplane.Config{Dir: dir})
//	defer cp.Down()
//	client := kubernetes.NewForConfigOrDie(cp.REST())
//
// Processes end with Down, and by the kernel's hand if the program that
// started them dies first. Nothing is left but the directory.
package controlplane
