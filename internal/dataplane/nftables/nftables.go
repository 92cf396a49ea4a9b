// Package nftables is the dataplane that serves Services with rules of nftables.
package nftables

import (
	"context"
	"errors"
	"log/slog"

	"spillway.dev/spillway/internal/dataplane"
)

// Config is how the dataplane is set up.
type Config struct {
	Log *slog.Logger
}

// New opens the dataplane.
func New(context.Context, Config) (dataplane.Backend, error) {
	return nil, errors.New("not in this build yet")
}

// Cleanup takes everything of this instance out of the kernel. What is not
// there is no error.
func Cleanup(context.Context, Config) error { return nil }
