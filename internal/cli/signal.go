package cli

import (
	"context"
	"os/signal"
	"syscall"
)

// UntilSignal returns a context that ends with SIGINT or SIGTERM. After the
// first signal the default action is restored, so that a second signal always
// ends the process. The caller must call the returned function.
func UntilSignal(parent context.Context) (context.Context, context.CancelFunc) {
	if parent == nil {
		parent = context.Background()
	}
	ctx, stop := signal.NotifyContext(parent, syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
