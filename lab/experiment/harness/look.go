package harness

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// Counters reads what conntrack has counted on a host.
func (h *Harness) Counters(ctx context.Context, host *topology.Host) (c conntrack.Counters, err error) {
	err = host.Do(func() error {
		conn, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer conn.Close()
		c, err = conn.Stats(ctx)
		return err
	})
	if err != nil {
		return c, fmt.Errorf("read conntrack counters of %s: %w", host.Name, err)
	}
	return c, nil
}

// LoadFrom runs the same load from several hosts at once, which share its
// connections and its rate, and adds the results up.
func (h *Harness) LoadFrom(ctx context.Context, hosts []*topology.Host, cfg load.Config) (*load.Result, error) {
	results, errs := make([]*load.Result, len(hosts)), make([]error, len(hosts))
	var wg sync.WaitGroup
	for i, host := range hosts {
		one := cfg
		one.Connections = cfg.Connections / len(hosts)
		if i < cfg.Connections%len(hosts) {
			one.Connections++
		}
		one.Rate = cfg.Rate / float64(len(hosts))
		if one.Connections == 0 {
			continue
		}
		wg.Go(func() { results[i], errs[i] = h.Load(ctx, host, one) })
	}
	wg.Wait()
	var ran []*load.Result
	for i := range hosts {
		if errs[i] != nil {
			return nil, errs[i]
		}
		if results[i] != nil {
			ran = append(ran, results[i])
		}
	}
	return load.Merge(ran)
}

// Logs returns the last lines of what agents and other peers have printed.
func (h *Harness) Logs() string {
	var b strings.Builder
	for _, p := range h.agents {
		if text := p.log.lastLines(15); text != "" {
			fmt.Fprintf(&b, "%s:\n%s\n", p.name, text)
		}
	}
	return b.String()
}
