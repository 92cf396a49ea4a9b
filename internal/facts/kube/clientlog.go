package kube

import (
	"context"
	"log/slog"

	"k8s.io/klog/v2"
)

// LogClients makes client-go log at level debug, for the whole process. client-go logs the
// same fault, or the same warning of the server, with each request. This package reports
// the faults as problems.
func LogClients(log *slog.Logger) {
	klog.SetSlogLogger(slog.New(debugOnly{log.Handler()}))
}

// debugOnly lowers every record to level debug.
type debugOnly struct{ slog.Handler }

// Enabled implements slog.Handler.
func (h debugOnly) Enabled(ctx context.Context, _ slog.Level) bool {
	return h.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle implements slog.Handler. logr does not call Enabled before it logs an error.
func (h debugOnly) Handle(ctx context.Context, r slog.Record) error {
	if r.Level = slog.LevelDebug; !h.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h debugOnly) WithAttrs(attrs []slog.Attr) slog.Handler {
	return debugOnly{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h debugOnly) WithGroup(name string) slog.Handler { return debugOnly{h.Handler.WithGroup(name)} }
