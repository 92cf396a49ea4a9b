// Package scale asks what holds in a large cluster under a stream of changes:
// on the real kernel, through the reconcile loop, for every dataplane.
package scale
