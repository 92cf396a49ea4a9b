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
	"spillway.dev/spillway/lab/load"
)

// NewCommand returns the command load, the load generator. bench, demo and lab start it
// as a process in the network namespace and cgroup of a client.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "load",
		Short: "Make load from this network namespace and say what came of it",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return cli.UsageErrorf("no kind of load given: use http, conn, memcached, udp, dns or tftp")
		},
	}
	cmd.AddCommand(
		newKindCommand(load.HTTP, "GET requests over connections that stay open"),
		newKindCommand(load.Conn, "one TCP connection for each GET request, ended by a reset"),
		newKindCommand(load.Memcached, "one TCP connection for each get, ended by the server"),
		newKindCommand(load.UDP, "a datagram out, a datagram back"),
		newKindCommand(load.DNS, "an A and an AAAA question from one new socket at once"),
		newKindCommand(load.TFTP, "a file read by TFTP, each from a new port"),
	)
	return cmd
}

func newKindCommand(kind load.Kind, short string) *cobra.Command {
	cfg := load.Config{Kind: kind}
	var sources []string
	var output string
	cmd := &cobra.Command{
		Use:   string(kind) + " ADDRESS:PORT",
		Short: short,
		Long: "Sends " + short + ".\n" + loops(kind) + `
Ctrl-C ends a run early with what there is. The exit code is 1 if not one request
was answered.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return run(cmd, cfg, args[0], sources, output)
		},
	}
	addFlags(cmd.Flags(), &cfg, &sources, &output)
	return cmd
}

// addFlags binds the flags that loads of a kind have.
func addFlags(f *pflag.FlagSet, cfg *load.Config, sources *[]string, output *string) {
	f.IntVar(&cfg.Connections, "connections", 16, "requests under way at once")
	f.DurationVar(&cfg.Duration, "duration", 2*time.Second, "how long to measure")
	f.DurationVar(&cfg.Warmup, "warmup", 200*time.Millisecond, "how long to send before that")
	f.DurationVar(&cfg.Timeout, "timeout", 0, "how long a request may take (default 5s, 1s for udp and tftp)")
	f.StringVarP(output, "output", "o", "table", "table or json")
	if cfg.Kind == load.TFTP {
		return
	}
	f.Float64Var(&cfg.Rate, "rate", 0, "requests per second, whatever the answers do; 0 sends the next when one is answered")
	f.Int64Var(&cfg.MaxRequests, "max-requests", 0, "end after so many counted requests; 0 is no limit")
	f.DurationVar(&cfg.Delay, "delay", 0, "how long each connection waits after an answer, in steps of 10ms")
	f.IntVar(&cfg.Threads, "threads", 1, "event loops that share the connections")
	f.StringSliceVar(sources, "source", nil, "addresses to send from, in turns")
	switch cfg.Kind {
	case load.UDP:
		f.StringVar(&cfg.Payload, "payload", "ping", "what to send")
		f.BoolVar(&cfg.FreshPorts, "fresh-ports", false, "take a new source port for each request")
	case load.DNS:
		f.StringVar(&cfg.Payload, "name", "example.test", "name to ask for")
	case load.HTTP, load.Conn:
		f.StringVar(&cfg.Path, "path", "/", "path to GET")
		f.StringVar(&cfg.Body, "body", "", "send POST requests of this JSON")
		f.BoolVar(&cfg.AnyStatus, "any-status", false, "take every HTTP status for an answer, and count each")
		f.StringVar(&cfg.Host, "host", "", "Host field (default the target)")
	}
}

// run generates a load and prints the result.
func run(cmd *cobra.Command, cfg load.Config, target string, sources []string, output string) error {
	if err := cli.CheckOutput(output); err != nil {
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
	if err := cli.PrintResult(cmd.OutOrStdout(), output, loadResult{result}); err != nil {
		return err
	}
	if result.Requests == 0 && !result.Interrupted {
		return fmt.Errorf("load %s: not one request was answered: is a server there?", cfg.Target)
	}
	return nil
}

// loops describes when requests of a kind leave.
func loops(kind load.Kind) string {
	if kind == load.TFTP {
		return "The next request leaves when one is answered (closed loop)."
	}
	return `Without --rate the next request leaves when one is answered (closed loop). With
--rate requests leave at their times whatever the answers do, and latency counts
from the intended time (open loop).`
}

// showProgress shows on a terminal how far a load is; elsewhere it is silent.
func showProgress(w io.Writer) (show func(load.Progress), done func()) {
	if !progress.IsTerminal(w) {
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
		fmt.Fprintf(w, "\nlatency: p50 %.0f µs, p99 %.0f µs, p99.9 %.0f µs, max %.0f µs\n", r.Latency.P50, r.Latency.P99, r.Latency.P999, r.Latency.Max)
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
		fmt.Fprintln(w, "not sent: they fell due while every connection was busy; the latency holds how long they waited until the end")
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
		fmt.Fprintln(w, "the generator was busy all the time: the server may be able to do more")
	}
	if r.Interrupted {
		fmt.Fprintln(w, "interrupted: this is what there was until then")
	}
	return nil
}
