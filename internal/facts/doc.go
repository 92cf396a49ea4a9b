// Package facts is the first of four groups of packages between YAML and the kernel. It
// holds the input of the cluster and its operators, parsed and checked, without a
// decision:
//
//	model       the facts: Services, EndpointSlices, nodes, pods, policies
//	kubeobject  converts Kubernetes objects to facts
//	manifest    reads facts from a watched directory of YAML
//	kube        reads facts from an API server
//	store       keeps the facts, with indexes; decisions read it
//
// The next group is internal/decisions.
package facts
