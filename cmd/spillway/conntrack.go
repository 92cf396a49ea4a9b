package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/conntrack"
	"spillway.dev/spillway/internal/conntrack/stale"
	"spillway.dev/spillway/internal/reconcile"
)

// netfilterTranslates reports whether netfilter translates the destination of
// any connection in the agent's network namespace.
func netfilterTranslates(ctx context.Context) (found bool, err error) {
	table, err := conntrack.Open()
	if errors.Is(err, conntrack.ErrUnsupported) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer table.Close()
	err = table.Dump(ctx, conntrack.Filter{Status: conntrack.DstNAT}, func(*conntrack.Entry) bool {
		found = true
		return false
	})
	if errors.Is(err, conntrack.ErrUnsupported) {
		return false, nil
	}
	return found, err
}

// openConntrack opens the conntrack of the agent's network namespace: its
// figures for register, its stale entries for reconcile. A kernel without it is
// no error: it then holds no entries that could be stale, and a dataplane that
// needs it says so itself.
func openConntrack(c agentConfig, log *slog.Logger, register func(prometheus.Collector) error) (entries reconcile.StaleEntries, closeAll func(), err error) {
	table, err := conntrack.Open()
	if errors.Is(err, conntrack.ErrUnsupported) {
		log.Info("conntrack entries are left alone", "reason", err)
		return nil, func() {}, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open conntrack: %w", err)
	}
	r, err := stale.New(stale.Config{Table: table, TranslatedOnly: !modeUsesNetfilter(c.ProxyMode)})
	if err == nil {
		err = errors.Join(register(r), register(conntrack.NewCollector()))
	}
	if err != nil {
		table.Close()
		return nil, nil, fmt.Errorf("register metrics of conntrack: %w", err)
	}
	return r, table.Close, nil
}
