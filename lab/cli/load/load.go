// Package load is the command that generates load.
package load

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/load"
)

// NewCommand returns the command load, the load generator. bench, demo and lab start it
// as a process in the network namespace and cgroup of a client.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "load",
		Short: "Generate load from this network namespace and report rates and latency",
		Example: `  spillway-lab load http 10.96.0.10:80
  spillway-lab lab exec client0 -- spillway-lab load udp 10.96.0.10:53`,
	}
	cmd.AddCommand(
		newKindCommand(load.HTTP, "GET requests over connections that stay open"),
		newKindCommand(load.Conn, "GET requests, each over a TCP connection of its own, ended by a reset"),
		newKindCommand(load.Memcached, "get requests, each over a TCP connection of its own, ended by the server"),
		newKindCommand(load.UDP, "datagrams that the server answers"),
		newKindCommand(load.DNS, "A and AAAA queries in pairs, each pair from a new socket"),
		newKindCommand(load.TFTP, "TFTP read requests, each from a new port"),
	)
	return cli.Group(cmd)
}

func newKindCommand(kind load.Kind, short string) *cobra.Command {
	cfg := load.Config{Kind: kind}
	var sources []string
	var output cli.Output
	cmd := &cobra.Command{
		Use:   string(kind) + " ADDRESS:PORT",
		Short: "Send " + short,
		Long: "Sends " + short + ".\n" + loops(kind) + `
Ctrl-C ends a run early and prints the results so far. The exit code is 1 if no
request was answered.`,
		Example: fmt.Sprintf("  spillway-lab load %[1]s 10.96.0.10:%[2]d\n  spillway-lab load %[1]s [fd00::10]:%[2]d --duration 10s -o json",
			kind, ports[kind]),
		Args: cli.Arguments("ADDRESS:PORT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return run(cmd, cfg, args[0], sources, output)
		},
	}
	addFlags(cmd.Flags(), &cfg, &sources)
	output.AddFlag(cmd)
	return cmd
}

// ports are those of examples.
var ports = map[load.Kind]int{load.HTTP: 80, load.Conn: 80, load.Memcached: 11211, load.UDP: 7, load.DNS: 53, load.TFTP: 69}

// addFlags binds the flags that loads of a kind have.
func addFlags(f *pflag.FlagSet, cfg *load.Config, sources *[]string) {
	f.IntVar(&cfg.Connections, "connections", 16, "Concurrent requests.")
	f.DurationVar(&cfg.Duration, "duration", 2*time.Second, "Time to measure.")
	f.DurationVar(&cfg.Warmup, "warmup", 200*time.Millisecond, "Time to send before the measurement.")
	f.DurationVar(&cfg.Timeout, "timeout", 0, "Timeout for a request (default: 5s, 1s for udp and tftp).")
	if cfg.Kind == load.TFTP {
		return
	}
	f.Float64Var(&cfg.Rate, "rate", 0, "Requests a second, independent of the answers. 0: the next when one is answered.")
	f.Int64Var(&cfg.MaxRequests, "max-requests", 0, "Number of counted requests after which to end. 0: no limit.")
	f.DurationVar(&cfg.Delay, "delay", 0, "Pause of each connection after an answer, in steps of 10ms.")
	f.IntVar(&cfg.Threads, "threads", 1, "Event loops that share the connections.")
	f.StringSliceVar(sources, "source", nil, "Source addresses, used in turn.")
	switch cfg.Kind {
	case load.UDP:
		f.StringVar(&cfg.Payload, "payload", "ping", "Content of the datagrams.")
		f.BoolVar(&cfg.FreshPorts, "fresh-ports", false, "Use a new source port for each request.")
	case load.DNS:
		f.StringVar(&cfg.Payload, "name", "example.test", "Name to query.")
	case load.HTTP, load.Conn:
		f.StringVar(&cfg.Path, "path", "/", "Path to GET.")
		f.StringVar(&cfg.Body, "body", "", "JSON to send in POST requests, instead of GET.")
		f.BoolVar(&cfg.AnyStatus, "any-status", false, "Accept every HTTP status as an answer, and count each.")
		f.StringVar(&cfg.Host, "host", "", "Host header (default: the target).")
	}
}

// run generates a load and prints the result.
func run(cmd *cobra.Command, cfg load.Config, target string, sources []string, output cli.Output) error {
	if err := output.Validate(); err != nil {
		return err
	}
	var err error
	if cfg.Target, err = netip.ParseAddrPort(target); err != nil {
		return cli.UsageErrorf("target %q: write ADDRESS:PORT, [ADDRESS]:PORT for IPv6", target)
	}
	for _, text := range sources {
		s, err := netip.ParseAddr(text)
		if err != nil {
			return cli.UsageErrorf("--source %q: not an address", text)
		}
		cfg.Sources = append(cfg.Sources, s)
	}
	if err := cfg.Validate(); err != nil {
		return cli.UsageErrorf("%v", err)
	}
	ctx, stop := cli.UntilSignal(cmd.Context())
	defer stop()
	show, done := showProgress(cmd.ErrOrStderr())
	cfg.Progress = show
	result, err := load.Run(ctx, cfg)
	done()
	if err != nil {
		return err
	}
	if err := output.Print(cmd.OutOrStdout(), loadResult{result}); err != nil {
		return err
	}
	if result.Requests == 0 && !result.Interrupted {
		return fmt.Errorf("load %s: no request was answered: check that a server listens there", cfg.Target)
	}
	return nil
}

// loops describes when requests of a kind leave.
func loops(kind load.Kind) string {
	if kind == load.TFTP {
		return "The next request is sent when one is answered (closed loop)."
	}
	return `Without --rate, the next request is sent when one is answered (closed loop). With
--rate, requests are sent at fixed times, independent of the answers, and latency counts
from the intended time (open loop).`
}

// showProgress shows on a terminal how far a load is; elsewhere it is silent.
func showProgress(w io.Writer) (show func(load.Progress), done func()) {
	if !page.IsTerminal(w) {
		return nil, func() {}
	}
	p := progress.New(w)
	return func(s load.Progress) {
		left := max(s.Total-s.Elapsed, 0).Round(time.Second)
		p.Step("%d answered, %d failed, %v left", s.Answered, s.Failed, left)
	}, p.Done
}

// loadResult is a result with a text form.
type loadResult struct{ *load.Result }

// Write prints the result as text.
func (r loadResult) Write(w io.Writer) error {
	fmt.Fprintf(w, "%s to %s: %d answered in %.1f s, %.0f/s", r.Kind, r.Target, r.Requests, r.Seconds, r.Rate)
	if r.WantedRate > 0 {
		fmt.Fprintf(w, " of %.0f/s wanted", r.WantedRate)
	}
	if r.Latency == (load.Latency{}) {
		fmt.Fprintf(w, "\nlatency: none measured\n")
	} else {
		fmt.Fprintf(w, "\nlatency: p50 %.0f µs, p99 %.0f µs, p99.9 %.0f µs, max %.0f µs\n", r.Latency.P50, r.Latency.P99,
			r.Latency.P999, r.Latency.Max)
	}
	fmt.Fprintf(w, "over 1 s: %d, over 3 s: %d\n", r.Over1s, r.Over3s)
	var kinds []string
	for kind := range r.Errors {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	for _, kind := range kinds {
		fmt.Fprintf(w, "failed: %d %s\n", r.Errors[kind], kind)
	}
	if r.Errors["not sent"] > 0 {
		fmt.Fprintln(w, "not sent: every connection was busy when they were due; the latency includes their wait until the end")
	}
	if r.UnderWay > 0 {
		fmt.Fprintf(w, "unanswered at the end: %d\n", r.UnderWay)
	}
	for _, s := range r.Slow {
		fmt.Fprintf(w, "slow: at %.3f s, %.3f s from %s %s\n", s.At, s.Seconds, s.Source, s.Error)
	}
	for status, n := range r.Statuses {
		fmt.Fprintf(w, "status %d: %d\n", status, n)
	}
	if r.ClientLimited {
		fmt.Fprintln(w, "the generator was busy all the time: the server may be faster than this")
	}
	if r.Interrupted {
		fmt.Fprintln(w, "interrupted: results until then")
	}
	return nil
}
