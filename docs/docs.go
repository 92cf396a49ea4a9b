// Package docs holds the documents that programs show.
package docs

import "embed"

// Runbooks has the Markdown files of runbooks.
//
//go:embed runbooks/*.md
var Runbooks embed.FS
