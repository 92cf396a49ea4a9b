// Package decisions is the second group on the way of a change. It turns the facts of a
// store into decisions for this node, without I/O:
//
//	donottrack  what do-not-track policies mean
//	egress      which connections of pods to the outside get the node's address here
//	intent      what each Service port means: all Service semantics
//	outlier     which endpoints fail: from what the dataplane sees, not from the store
//
// The second input is Kernel: what reconcile knows that the kernel holds. Tracker.Observe takes
// what it has seen of connections.
//
// Donottrack and intent read the same store. Donottrack comes first: its Traversal says which pods' packets
// must traverse netfilter because of do-not-track policies, and intent needs that for the endpoints. Intent
// also takes the endpoints that outlier has ejected, and the Plan of egress.
//
// internal/reconcile, the next step, decides when the result is written, and the
// dataplanes in internal/dataplane write it.
package decisions
