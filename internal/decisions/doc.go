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
// Policies and intent read the same store. Policies come first: they say which packets must
// traverse netfilter, and intent needs that for the endpoints. It also takes those that fail.
//
// internal/reconcile, the next step, decides when the result is written, and the
// dataplanes in internal/dataplane write it.
package decisions
