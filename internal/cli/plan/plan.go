// Package plan is the command that computes the size of conntrack tables.
package plan

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
)

// config is the command line of `spillway plan`.
type config struct {
	loads    []string
	timeouts []string
	table    int
	headRoom float64
	wait     time.Duration
	lost     float64
	live     bool
	sample   time.Duration
	output   string
}

// NewCommand returns the command plan.
func NewCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Compute the conntrack table that a load needs, and the load that a table carries",
		Long: `Computes the conntrack entries, expectations and bytes that a load needs, and the
connections a second that a table carries. A load is KIND=RATE or KIND=RATE,LIFETIME.
RATE is in new connections a second. KIND is one of
  udp, udp-unanswered, tcp, tcp-reset, tcp-unanswered, tcp-idle, icmp, tftp.
With --live, the table and the timeouts are those of this network namespace. The command
watches the table and estimates when it is full.`,
		Example: "  spillway plan --load tcp=4000 --load tftp=5100,20ms --table 524288 --timeout udp=10s",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			p, err := c.plan(ctx)
			if err != nil {
				return err
			}
			return cli.PrintResult(cmd.OutOrStdout(), c.output, p)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringArrayVar(&c.loads, "load", nil, "Load as KIND=RATE[,LIFETIME]. May be given several times.")
	f.IntVar(&c.table, "table", 0, "Size of a table (nf_conntrack_max) to compute the highest rate of.")
	f.StringArrayVar(&c.timeouts, "timeout", nil, "Timeout as NAME=DURATION; names: udp, udp_stream, tcp_syn_sent, tcp_established, tcp_time_wait, tcp_close, icmp (default: Linux's).")
	f.Float64Var(&c.headRoom, "head-room", 0.25, "Share of the table that stays free.")
	f.DurationVar(&c.wait, "wait", 100*time.Millisecond, "Time from a helper's request to the packet that it expects.")
	f.Float64Var(&c.lost, "lost", 0, "Share of the expected packets that never arrive, from 0 to 1.")
	f.BoolVar(&c.live, "live", false, "Use the table and timeouts of this network namespace.")
	f.DurationVar(&c.sample, "sample", 2*time.Second, "Time that --live watches the table.")
	f.StringVarP(&c.output, "output", "o", "table", "Output format: table or json.")
	return cmd
}

// planReport is a plan, and the table that --live read.
type planReport struct {
	capacity.Plan
	Limit int         `json:"limit,omitempty"` // entries of the table that the ceilings are of
	Live  *liveReport `json:"live,omitempty"`
}

// liveReport describes the current state of a table.
type liveReport struct {
	Entries   int     `json:"entries"`
	Limit     int     `json:"limit"`
	PerSecond float64 `json:"per_second"`        // by how much it grew
	FullIn    string  `json:"full_in,omitempty"` // "" if it does not fill at this rate
}

func (c *config) plan(ctx context.Context) (*planReport, error) {
	if err := cli.CheckOutput(c.output); err != nil {
		return nil, err
	}
	cfg := capacity.Config{Timeouts: capacity.DefaultTimeouts, Headroom: c.headRoom, Limit: c.table, Wait: c.wait, Lost: c.lost}
	report := &planReport{}
	if c.live {
		limits, err := conntrack.ReadLimits()
		if err != nil {
			return nil, fmt.Errorf("read conntrack's limits: %w", err)
		}
		for name, d := range limits.Timeouts {
			setTimeout(&cfg.Timeouts, name, d)
		}
		if cfg.Limit == 0 {
			cfg.Limit = limits.Max
		}
		if report.Live, err = watchTable(ctx, c.sample); err != nil {
			return nil, err
		}
	}
	if err := c.apply(&cfg); err != nil {
		return nil, err
	}
	if err := cfg.Validate(); err != nil {
		return nil, cli.UsageErrorf("%v", err)
	}
	p, err := capacity.Make(cfg)
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	report.Plan, report.Limit = p, cfg.Limit
	return report, nil
}

// apply sets the timeouts and loads of the command line.
func (c *config) apply(cfg *capacity.Config) error {
	for _, s := range c.timeouts {
		name, value, _ := strings.Cut(s, "=")
		d, err := time.ParseDuration(value)
		if err != nil || d < 0 || !setTimeout(&cfg.Timeouts, name, d) {
			return cli.UsageErrorf("--timeout %q: write one like udp=10s; the names are in --help", s)
		}
	}
	for _, s := range c.loads {
		l, err := parseLoad(s)
		if err != nil {
			return err
		}
		cfg.Loads = append(cfg.Loads, l)
	}
	if len(cfg.Loads) == 0 {
		if !c.live && c.table == 0 {
			return cli.UsageErrorf("nothing to plan: give --load KIND=RATE, --table ENTRIES or --live")
		}
		for _, k := range capacity.Kinds { // the possible share of each kind in the table
			cfg.Loads = append(cfg.Loads, capacity.Load{Kind: k})
		}
	}
	return nil
}

// watchTable sees how fast the table of this namespace fills.
func watchTable(ctx context.Context, d time.Duration) (*liveReport, error) {
	conn, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	before, _, err := conn.Size()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(d):
	}
	after, limit, err := conn.Size()
	if err != nil {
		return nil, err
	}
	l := &liveReport{Entries: int(after), Limit: int(limit)}
	if took := time.Since(start).Seconds(); took > 0 {
		l.PerSecond = (float64(after) - float64(before)) / took
	}
	if full, fills := capacity.FullIn(l.Entries, l.Limit, l.PerSecond); fills {
		l.FullIn = full.Round(time.Second).String()
	}
	return l, nil
}

func parseLoad(s string) (capacity.Load, error) {
	kind, rest, _ := strings.Cut(s, "=")
	rate, life, lives := strings.Cut(rest, ",")
	l := capacity.Load{Kind: capacity.Kind(kind)}
	var err error
	if l.Rate, err = strconv.ParseFloat(rate, 64); err == nil && lives {
		l.Life, err = time.ParseDuration(life)
	}
	if err != nil {
		return l, cli.UsageErrorf("--load %q: write one like tcp=4000 or tftp=100,20ms", s)
	}
	if err := l.Validate(); err != nil {
		return l, cli.UsageErrorf("--load %q: %v", s, err)
	}
	return l, nil
}

// setTimeout sets a timeout by conntrack's name. It returns false if the arithmetic does not
// use that timeout.
func setTimeout(t *capacity.Timeouts, name string, d time.Duration) bool {
	field, ok := map[string]*time.Duration{
		"udp": &t.UDP, "udp_stream": &t.UDPStream, "tcp_syn_sent": &t.TCPSynSent, "tcp_established": &t.TCPEstablish,
		"tcp_time_wait": &t.TCPTimeWait, "tcp_close": &t.TCPClose, "icmp": &t.ICMP,
	}[name]
	if ok {
		*field = d
	}
	return ok
}

// Write prints the plan as text.
func (p *planReport) Write(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if p.Limit > 0 {
		fmt.Fprintf(tw, "KIND\tRATE\tHIGHEST RATE OF %d ENTRIES\n", p.Limit)
	} else {
		fmt.Fprintf(tw, "KIND\tRATE\n")
	}
	for i, l := range p.Loads {
		fmt.Fprintf(tw, "%s\t%s/s", l.Kind, strconv.FormatFloat(l.Rate, 'f', -1, 64))
		if i < len(p.Ceilings) {
			fmt.Fprintf(tw, "\t%.0f/s", math.Floor(p.Ceilings[i]))
		}
		fmt.Fprintln(tw)
	}
	if p.Entries > 0 {
		fmt.Fprintf(tw, "\nentries in the long run\t%d\n", p.Entries)
		fmt.Fprintf(tw, "nf_conntrack_max\t%d\n", p.Table)
		fmt.Fprintf(tw, "nf_conntrack_buckets\t%d\n", p.Buckets)
		fit := ""
		if !p.ExpectFit {
			fit = fmt.Sprintf(": they do not fit; set nf_conntrack_expect_max to %d or more", p.Expectations)
		}
		fmt.Fprintf(tw, "expectations\t%d of %d%s\n", p.Expectations, p.ExpectMax, fit)
		fmt.Fprintf(tw, "memory of a full table\t%.1f MiB\n", float64(p.Bytes)/(1<<20))
	}
	if l := p.Live; l != nil {
		fmt.Fprintf(tw, "\nnow\t%d of %d entries, %+.1f/s\n", l.Entries, l.Limit, l.PerSecond)
		full := "not at this rate"
		if l.FullIn != "" {
			full = "in " + l.FullIn
		}
		fmt.Fprintf(tw, "full\t%s\n", full)
	}
	return tw.Flush()
}
