// Package ui holds the page of `spillway ui`, which npm builds from src into dist.
package ui

import "embed"

// Dist has the files of the page below dist.
//
//go:embed dist
var Dist embed.FS
