package main

import (
	"encoding/json"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/lab/load"
)

// newLoadCommand makes `spillway load`, the load generator that bench and demo
// start as a process of its own inside a client's namespace and cgroup.
func newLoadCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:    "load",
		Short:  "Make load from this network namespace and print what came of it as JSON",
		Hidden: true,
	}
	cmd.AddCommand(
		newLoadKindCommand(load.HTTP, "GET requests over connections that stay open"),
		newLoadKindCommand(load.Conn, "one TCP connection for each GET request, ended by a reset"),
		newLoadKindCommand(load.Memcached, "one TCP connection for each get, ended by the server"),
		newLoadKindCommand(load.UDP, "a datagram out, a datagram back"),
		newLoadKindCommand(load.TFTP, "a file read by TFTP, each from a new port"),
	)
	return cmd
}

func newLoadKindCommand(kind load.Kind, short string) *cobra.Command {
	cfg := load.Config{Kind: kind}
	var source string
	cmd := &cobra.Command{
		Use:   string(kind) + " ADDRESS:PORT",
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if cfg.Target, err = netip.ParseAddrPort(args[0]); err != nil {
				return usageErrorf("target %q: write ADDRESS:PORT, [ADDRESS]:PORT for IPv6", args[0])
			}
			if source != "" {
				if cfg.Source, err = netip.ParseAddr(source); err != nil {
					return usageErrorf("--source %q: not an address", source)
				}
			}
			if err := cfg.Validate(); err != nil {
				return usageErrorf("%v", err)
			}
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			result, err := load.Run(ctx, cfg)
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(result)
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.Connections, "connections", 16, "requests under way at once")
	f.Float64Var(&cfg.Rate, "rate", 0, "requests per second, whatever the answers do; 0 sends the next when one is answered")
	f.DurationVar(&cfg.Duration, "duration", 2*time.Second, "how long to measure")
	f.DurationVar(&cfg.Warmup, "warmup", 200*time.Millisecond, "how long to send before that")
	f.Int64Var(&cfg.MaxRequests, "max-requests", 0, "end after so many counted requests; 0 is no limit")
	f.DurationVar(&cfg.Timeout, "timeout", 0, "how long a request may take (default 5s, 1s for udp)")
	f.IntVar(&cfg.Threads, "threads", 1, "event loops that share the connections")
	f.StringVar(&source, "source", "", "address to send from")
	if kind == load.UDP {
		f.StringVar(&cfg.Payload, "payload", "ping", "what to send")
		f.BoolVar(&cfg.FreshPorts, "fresh-ports", false, "take a new source port for each request")
	} else {
		f.StringVar(&cfg.Path, "path", "/", "path to GET")
		f.StringVar(&cfg.Host, "host", "", "Host field (default the target)")
	}
	return cmd
}
