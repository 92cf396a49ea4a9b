// Package examples holds the manifests that the demo serves, so that the
// program carries them wherever it is run.
package examples

import "embed"

// Demo is the directory demo with the manifests of `spillway-lab demo`.
//
//go:embed demo/*.yaml
var Demo embed.FS
