// Package nodev1alpha1 has the messages of the agent's API, which api/proto defines.
// docs/reference/node-api.md describes how to reach it.
package nodev1alpha1

//go:generate ../../../hack/proto/generate
