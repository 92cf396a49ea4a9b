package main

import (
	"context"
	"os/signal"
	"syscall"
)

// untilSignal returns a context that ends with SIGINT or SIGTERM. After the
// first signal the default action is back, so that a second one always ends
// the process.
func untilSignal(parent context.Context) (context.Context, context.CancelFunc) {
	if parent == nil {
		parent = context.Background()
	}
	ctx, stop := signal.NotifyContext(parent, syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
