// Package facts is the first of four groups that a change passes on its way from
// YAML to the kernel. It holds what the cluster and its operators say, parsed and checked,
// without a decision:
//
//	model       the facts: Services, EndpointSlices, nodes, pods, policies
//	kubeobject  converts Kubernetes objects to facts
//	manifest    reads facts from a watched directory of YAML
//	kube        reads facts from an API server
//	store       keeps the facts, with indexes; decisions read it
//
// The next group is internal/decisions.
package facts
