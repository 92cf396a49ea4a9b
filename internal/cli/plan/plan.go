// Package plan is the command that computes the size of conntrack tables.
package plan

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/page"
)

// config is the command line of `spillway plan`.
type config struct {
	loads    []string
	timeouts []string
	table    int
	headroom float64
	wait     time.Duration
	lost     float64
	live     bool
	netns    string
	sample   time.Duration
	output   cli.Output
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
With --live, the table and the timeouts are those of a network namespace: this one, or
that of --netns. The command watches the table and estimates when it is full.`,
		Example: `  spillway plan --load tcp=4000 --load tftp=5100,20ms --table 524288
  spillway plan --table 262144 --timeout tcp_time_wait=30s
  spillway plan --live --netns cni-3f1c --sample 10s`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.validate(cmd.Flags().Changed); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			p, err := c.plan(ctx)
			if err != nil {
				return err
			}
			return c.output.Print(cmd.OutOrStdout(), p)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringArrayVar(&c.loads, "load", nil, "Load as `KIND=RATE[,LIFETIME]`. May be given several times.")
	f.IntVar(&c.table, "table", 0, "Size of a table in `entries` (nf_conntrack_max), to compute its highest rates and whether the loads fit.")
	f.StringArrayVar(&c.timeouts, "timeout", nil,
		"Timeout as `NAME=DURATION`; names: udp, udp_stream, tcp_syn_sent, tcp_established, tcp_time_wait, tcp_close, icmp (default: Linux's).")
	f.Float64Var(&c.headroom, "headroom", 0.25, "Free `share` of the table.")
	f.DurationVar(&c.wait, "wait", 100*time.Millisecond, "Time from a helper's request to the packet that it expects.")
	f.Float64Var(&c.lost, "lost", 0, "Lost `share` of the expected packets, from 0 to 1.")
	f.BoolVar(&c.live, "live", false, "Use the table and timeouts of a network namespace.")
	f.StringVar(&c.netns, "netns", "", "Network `namespace` of --live: a name that 'spillway top' shows, a process id, or here (default: "+
		"here).")
	f.DurationVar(&c.sample, "sample", 2*time.Second, "Time that --live watches the table.")
	c.output.AddFlag(cmd)
	var kinds, names []string
	for _, k := range capacity.Kinds {
		kinds = append(kinds, string(k)+"=")
	}
	for _, name := range timeoutNames() {
		names = append(names, name+"=")
	}
	cli.Choices(cmd, "load", kinds...)
	cli.Choices(cmd, "timeout", names...)
	cli.GroupFlags(f, "Load", "load", "wait", "lost")
	cli.GroupFlags(f, "Table", "table", "timeout", "headroom", "live", "netns", "sample")
	cli.CompleteNamespaces(cmd, "netns")
	return cmd
}

// planReport is a plan, and the table that --live read.
type planReport struct {
	capacity.Plan
	Limit int         `json:"limit,omitempty"` // entries of the table that the ceilings are of
	Short int         `json:"short,omitempty"` // entries that the loads need and that table lacks
	Live  *liveReport `json:"live,omitempty"`
}

// liveReport describes the current state of a table.
type liveReport struct {
	Entries   int     `json:"entries"`
	Limit     int     `json:"limit"`
	Namespace string  `json:"namespace"`
	PerSecond float64 `json:"perSecond"`        // by how much it grew
	FullIn    string  `json:"fullIn,omitempty"` // "" if it does not fill at this rate
}

// validate checks single flags; given reports whether the command line has one.
func (c *config) validate(given func(flag string) bool) error {
	if err := c.output.Validate(); err != nil {
		return err
	}
	switch {
	case given("table") && c.table < 1:
		return cli.UsageErrorf("--table %d: must be 1 or more entries", c.table)
	case c.wait < 0:
		return cli.UsageErrorf("--wait %v: must not be negative", c.wait)
	case !(c.headroom >= 0 && c.headroom < 1): // NaN fails both comparisons
		return cli.UsageErrorf("--headroom %v: must be from 0 to less than 1", c.headroom)
	case !(c.lost >= 0 && c.lost <= 1):
		return cli.UsageErrorf("--lost %v: must be from 0 to 1", c.lost)
	case given("netns") && !c.live:
		return cli.UsageErrorf("--netns %s: needs --live", c.netns)
	case c.live && c.sample <= 0:
		return cli.UsageErrorf("--sample %v: must be longer than 0s", c.sample)
	}
	if c.live {
		return cli.NeedRoot("read the live table")
	}
	return nil
}

func (c *config) plan(ctx context.Context) (*planReport, error) {
	cfg := capacity.Config{Timeouts: capacity.DefaultTimeouts, Headroom: c.headroom, Limit: c.table, Wait: c.wait, Lost: c.lost}
	report := &planReport{}
	if c.live {
		limits, err := c.watch(ctx, report)
		if err != nil {
			return nil, err
		}
		for name, d := range limits.Timeouts {
			setTimeout(&cfg.Timeouts, name, d)
		}
		if cfg.Limit == 0 {
			cfg.Limit = limits.Max
		}
	}
	if err := c.apply(&cfg); err != nil {
		return nil, err
	}
	p, err := capacity.Make(cfg)
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	report.Plan, report.Limit = p, cfg.Limit
	if cfg.Limit > 0 {
		report.Short = max(p.Entries-cfg.Limit, 0)
	}
	return report, nil
}

// apply sets the timeouts and loads of the command line.
func (c *config) apply(cfg *capacity.Config) error {
	for _, s := range c.timeouts {
		name, value, _ := strings.Cut(s, "=")
		known := timeoutNames()
		if !slices.Contains(known, name) {
			return cli.UsageErrorf("--timeout %q: %q is not a name of a timeout%s: use one of %s", s, name, cli.DidYouMean(name, known),
				strings.Join(known, ", "))
		}
		d, err := time.ParseDuration(value)
		if err != nil || d < 0 {
			return cli.UsageErrorf("--timeout %q: %q is not a duration, or is negative: write one like %s=10s", s, value, name)
		}
		setTimeout(&cfg.Timeouts, name, d)
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

// watch reads the limits of the namespace of --netns, and watches its table.
func (c *config) watch(ctx context.Context, report *planReport) (limits conntrack.Limits, err error) {
	name := c.netns
	if name == "" {
		name = "here"
	}
	list, err := cli.Namespaces([]string{name})
	if err != nil {
		return limits, err
	}
	err = list[0].Enter(func() (err error) {
		if limits, err = conntrack.ReadLimits(); err != nil {
			return fmt.Errorf("read conntrack's limits: %w", err)
		}
		report.Live, err = watchTable(ctx, c.sample)
		return err
	})
	if err == nil {
		report.Live.Namespace = list[0].String()
	}
	return limits, err
}

// watchTable sees how fast the table of this namespace fills.
func watchTable(ctx context.Context, d time.Duration) (*liveReport, error) {
	conn, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	before, _, err := conn.Size()
	if errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("%w: run it as root with CAP_NET_ADMIN", err)
	}
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
	if l.Rate == 0 {
		return l, cli.UsageErrorf("--load %q: rate 0: must be more than 0 connections a second", s)
	}
	return l, nil
}

// setTimeout sets a timeout by conntrack's name. It returns false if the arithmetic does not
// use that timeout.
func setTimeout(t *capacity.Timeouts, name string, d time.Duration) bool {
	field, ok := timeoutsOf(t)[name]
	if ok {
		*field = d
	}
	return ok
}

// timeoutNames returns the names of the timeouts, sorted.
func timeoutNames() []string {
	return slices.Sorted(maps.Keys(timeoutsOf(&capacity.Timeouts{})))
}

// timeoutsOf returns the timeouts by conntrack's names.
func timeoutsOf(t *capacity.Timeouts) map[string]*time.Duration {
	return map[string]*time.Duration{
		"udp": &t.UDP, "udp_stream": &t.UDPStream, "tcp_syn_sent": &t.TCPSynSent, "tcp_established": &t.TCPEstablish,
		"tcp_time_wait": &t.TCPTimeWait, "tcp_close": &t.TCPClose, "icmp": &t.ICMP,
	}
}

// Write prints the plan as text.
func (p *planReport) Write(w io.Writer) error {
	var err error
	for i, part := range []*page.Table{p.rates(), p.needs(), p.now()} {
		if part == nil {
			continue
		}
		if i > 0 {
			_, err = fmt.Fprintln(w)
		}
		if err = errors.Join(err, part.Write(w)); err != nil {
			return err
		}
	}
	return nil
}

// loaded reports that the plan is for loads, and not only for a table.
func (p *planReport) loaded() bool { return p.Entries > 0 }

// rates is the table of loads, with the rates that a table of this size carries.
func (p *planReport) rates() *page.Table {
	columns := []page.Column{page.Text("KIND")}
	if p.loaded() {
		columns = append(columns, page.Number("RATE /s"))
	}
	if p.Limit > 0 {
		columns = append(columns, page.Number(fmt.Sprintf("MOST /s OF %d ENTRIES", p.Limit)))
	}
	t := page.NewTable(columns...)
	for i, l := range p.Loads {
		row := []any{l.Kind}
		if p.loaded() {
			row = append(row, strconv.FormatFloat(l.Rate, 'f', -1, 64))
		}
		if i < len(p.Ceilings) {
			row = append(row, strconv.FormatFloat(math.Floor(p.Ceilings[i]), 'f', 0, 64))
		}
		t.Row(row...)
	}
	if !p.loaded() {
		t.Foot("Each rate is for a table with connections of that kind only.")
	}
	return t
}

// needs is the table of what the loads need; nil without loads.
func (p *planReport) needs() *page.Table {
	if !p.loaded() {
		return nil
	}
	t := page.NewTable(page.Text("FOR THIS LOAD"), page.Number("VALUE"))
	t.Row("entries in the long run", p.Entries)
	t.Row("nf_conntrack_max, with headroom", p.Table)
	t.Row("nf_conntrack_buckets", p.Buckets)
	t.Row("expectations at once", p.Expectations)
	t.Row("nf_conntrack_expect_max of these buckets", p.ExpectMax)
	t.Row("memory of a full table, MiB", fmt.Sprintf("%.1f", float64(p.Bytes)/(1<<20)))
	switch {
	case p.Short > 0:
		t.Verdict(page.Bad, "TOO SMALL", "the table of %d entries lacks %d of the %d that this load needs.", p.Limit, p.Short, p.Entries)
	case p.Limit > 0 && p.Table > p.Limit:
		t.Verdict(page.Warning, "TIGHT", "the load fits into the table of %d entries, without the headroom.", p.Limit)
	case p.Limit > 0:
		t.Verdict(page.Good, "OK", "the load fits into the table of %d entries, with the headroom.", p.Limit)
	}
	if p.Limit == 0 || p.Table > p.Limit {
		t.Foot("To set it until the next restart, as root:")
		t.Foot("  sysctl -w net.netfilter.nf_conntrack_max=%d", p.Table)
		t.Foot("  sysctl -w net.netfilter.nf_conntrack_buckets=%d", p.Buckets)
	}
	if !p.ExpectFit {
		t.Verdict(page.Bad, "TOO FEW EXPECTATIONS", "they do not fit; to set the limit:")
		t.Foot("  sysctl -w net.netfilter.nf_conntrack_expect_max=%d", p.Expectations)
	}
	return t
}

// now is the table of the current state; nil without --live.
func (p *planReport) now() *page.Table {
	l := p.Live
	if l == nil {
		return nil
	}
	t := page.NewTable(page.Text("NOW"), page.Number("VALUE"))
	t.Row("network namespace", l.Namespace)
	t.Row("entries", l.Entries)
	t.Row("nf_conntrack_max", l.Limit)
	t.Row("free entries", max(l.Limit-l.Entries, 0))
	t.Row("growth, entries /s", fmt.Sprintf("%+.1f", l.PerSecond))
	l.judge(t)
	return t
}

// judge adds to the table how far the table of conntrack is from full.
func (l *liveReport) judge(t *page.Table) {
	share := float64(l.Entries) / float64(max(l.Limit, 1))
	used := fmt.Sprintf("%.1f %% of the table is in use", 100*share)
	when := "it does not fill at this rate"
	if l.FullIn != "" {
		when = "at this rate it is full in " + l.FullIn
	}
	switch {
	case l.Limit == 0:
		t.Foot("The size of the table is unknown.")
	case l.Entries >= l.Limit:
		t.Verdict(page.Bad, "FULL", "the kernel drops the first packet of new connections. Raise nf_conntrack_max; 'spillway doctor' has "+
			"the commands.")
	case share >= capacity.Full:
		t.Verdict(page.Bad, "NEARLY FULL", "%s, and a burst of %d new connections fills it; %s. Raise nf_conntrack_max; 'spillway doctor' "+
			"has the commands.", used, l.Limit-l.Entries, when)
	case share >= capacity.CloseToFull:
		t.Verdict(page.Warning, "CLOSE TO FULL", "%s; %s. Raise nf_conntrack_max before the next peak.", used, when)
	default:
		t.Verdict(page.Good, "OK", "%s; %s.", used, when)
	}
}
