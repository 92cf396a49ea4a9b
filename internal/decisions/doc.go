// Package decisions is the second group on the way of a change. It holds pure functions of
// the facts; nothing here does I/O:
//
//	intent  what each Service port means on this node: all Service semantics
//	policy  what do-not-track policies mean on this node
//
// internal/reconcile, the next step, decides when the result is written, and the
// dataplanes in internal/dataplane write it.
package decisions
