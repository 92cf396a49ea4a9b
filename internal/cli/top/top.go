// Package top is the command that shows the use of conntrack.
package top

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/diagnosis/top"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/page"
)

// NewCommand returns the command top.
func NewCommand() *cobra.Command {
	var interval time.Duration
	var once bool
	var view string
	var pins cli.Pins
	var socket nodeclient.Socket
	var cluster reach.Flags
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the use of conntrack in every network namespace of this machine",
		Long: `Shows the use of the conntrack table and the drops of every network namespace in which
conntrack is in use, and refreshes the page until it is interrupted. --view shows Services,
endpoints or sources of flows. In a terminal, keys select the view, the order and a filter;
the last line of the page lists them. With -o json, each line is an array. Flows of the
eBPF dataplane are not in conntrack: an agent of this machine adds them to these views, and
the names of Services and pods. --view egress counts pods' connections to the outside
by pod and destination, from that agent. Needs root.

With --node or --all-nodes it runs in the agents' containers, by exec through the API
server. That takes more than the rights of a viewer. There, it shows fewer network
namespaces. The exit code is 1 if it fails on one of them.`,
		Example: `  spillway top
  spillway top --once -o wide
  spillway top --view services --once
  spillway top --view egress
  spillway top --interval 10s -o json
  spillway top --once --all-nodes`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			shown, known := top.ParseView(view)
			if !known {
				return cli.UsageErrorf("--view %q: not a view: use %s", view, strings.Join(top.ViewNames(), ", "))
			}
			if err := cli.NotEmpty(cmd.Flags(), "api-socket"); err != nil {
				return err
			}
			if interval < 100*time.Millisecond {
				return cli.UsageErrorf("--interval %v: must be 100ms or longer", interval)
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if !cluster.Local() {
				return cluster.Run(ctx, cmd, output)
			}
			if err := cluster.Validate(cmd, false); err != nil {
				return err
			}
			if err := cli.NeedRoot("read conntrack"); err != nil {
				return err
			}
			serving := servingText(pins.Dir())
			if !once && !output.ForPrograms() && page.IsTerminal(cmd.OutOrStdout()) {
				return watchTop(ctx, interval, shown, serving, newAgent(socket.Dialer()))
			}
			t := topPages{out: cmd.OutOrStdout(), warn: cmd.ErrOrStderr(), output: output, once: once, read: conntrack.ReadAll, serving: serving}
			if shown != top.Namespaces {
				c := top.NewCollector()
				c.Agent = newAgent(socket.Dialer())
				t.sample = func(ctx context.Context) (top.Sample, error) { return c.Read(ctx, shown, 0) }
			}
			return t.run(ctx, interval)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&interval, "interval", 2*time.Second, "Time between two pages.")
	f.BoolVar(&once, "once", false, "Print one page and exit.")
	f.StringVar(&view, "view", top.Namespaces.String(), "What to count: "+strings.Join(top.ViewNames(), ", ")+".")
	cli.Choices(cmd, "view", top.ViewNames()...)
	socket.AddFlag(f)
	pins.AddFlag(f, "Directory of the agent's pins, to tell whether the eBPF dataplane serves.")
	output.AddFlag(cmd)
	cluster.AddNodes(f)
	cluster.Complete(cmd, &socket)
	return cmd
}

// servingText describes the eBPF dataplane with pins below bpffs, whose connections have
// no entries; "" without one.
func servingText(bpffs string) string {
	if _, err := inspect.PinnedVerdicts(bpffs); err != nil {
		return ""
	}
	return "the eBPF dataplane serves here, without conntrack"
}

// watchTop shows the interactive view until the user quits.
func watchTop(ctx context.Context, interval time.Duration, view top.View, serving string, agent top.Agent) error {
	c := top.NewCollector()
	c.Serving, c.Agent = serving, agent
	ctx, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer stop()
	watching.Go(func() { c.Watch(ctx) })
	_, err := tea.NewProgram(top.NewModel(ctx, c.Read, view, interval), tea.WithContext(ctx), tea.WithoutSignalHandler()).Run()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("show terminal: %w", err)
	}
	return nil
}

// topPages prints pages one after the other.
type topPages struct {
	out, warn io.Writer
	output    cli.Output
	once      bool
	serving   string // of servingText
	read      func(context.Context) ([]conntrack.Report, error)
	// sample reads another view than namespaces; nil: the view is namespaces.
	sample func(context.Context) (top.Sample, error)

	collector top.Collector
	warned    string
}

func (t *topPages) run(ctx context.Context, interval time.Duration) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if err := t.page(ctx); err != nil || t.once {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// page reads and prints once. It reports errors of some namespaces once. It returns an
// error only if nothing could be read.
func (t *topPages) page(ctx context.Context) error {
	if t.sample != nil {
		return t.addressPage(ctx)
	}
	reports, err := t.read(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if errors.Is(err, conntrack.ErrUnsupported) || errors.Is(err, conntrack.ErrNothingRead) {
		return err
	}
	rows := t.collector.Compare(reports, time.Now())
	if t.output.ForPrograms() {
		if err := t.output.Encode(t.out, objects(rows), ""); err != nil {
			return err
		}
	} else if err := t.output.Print(t.out, topTable{top.Namespaces, rows, t.serving}); err != nil {
		return err
	}
	if err != nil {
		t.warnOnce(escape.OneLine(err))
	}
	return nil
}

// warnOnce prints a line, unless it is the last that was printed.
func (t *topPages) warnOnce(line string) {
	if line != t.warned {
		t.warned = line
		fmt.Fprintf(t.warn, "spillway: %s\n", line)
	}
}

// addressPage is page for another view than namespaces.
func (t *topPages) addressPage(ctx context.Context) error {
	s, err := t.sample(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	top.Sort(s.Rows)
	if t.output.ForPrograms() {
		err = t.output.Encode(t.out, addressObjects(s.Rows), "")
	} else {
		err = t.output.Print(t.out, topTable{s.View, s.Rows, ""})
	}
	if err == nil && len(s.Problems) > 0 {
		t.warnOnce(escape.Text(strings.Join(s.Problems, "; ")))
	}
	return err
}

// addressObject is a row of another view than namespaces, for programs. The keys are an
// interface.
type addressObject struct {
	Protocol string `json:"protocol,omitempty"`
	Address  string `json:"address"`
	Port     uint16 `json:"port,omitempty"`
	Client   string `json:"client,omitempty"` // of egress: the address of Owner's pod
	top.Owner
	Entries int     `json:"entries"`
	Rate    float64 `json:"entriesPerSecond"`
}

func addressObjects(rows []top.Row) []addressObject {
	list := make([]addressObject, 0, len(rows))
	for _, r := range rows {
		a := r.Address.AddrPort
		client := ""
		if r.Client.IsValid() {
			client = r.Client.String()
		}
		list = append(list, addressObject{r.Address.Protocol, a.Addr().String(), a.Port(), client, r.Owner, r.Entries, r.Rate})
	}
	return list
}

// object is a row for programs. The keys are an interface.
type object struct {
	Name string `json:"name"`
	*conntrack.Report
	Rate   float64 `json:"entriesPerSecond"`
	PerSec float64 `json:"dropsPerSecond"`
}

func objects(rows []top.Row) []object {
	list := make([]object, 0, len(rows))
	for _, r := range rows {
		list = append(list, object{r.Name, r.Report, r.Rate, r.PerSec})
	}
	return list
}

// topTable is a page of a view.
type topTable struct {
	view    top.View
	rows    []top.Row
	serving string
}

// Write prints the page.
func (p topTable) Write(w io.Writer) error {
	columns := p.view.PageColumns()
	heads := make([]page.Column, len(columns))
	for i, c := range columns {
		heads[i] = page.Column{Name: c.Name, Right: c.Least == 0, Wide: c.In == top.Wide, Least: c.Least, Cut: c.Least > 0}
	}
	t := page.NewTable(heads...)
	for i := range p.rows {
		cells := make([]any, len(columns))
		for k := range columns {
			cells[k] = columns[k].Cell(&p.rows[i])
		}
		t.Row(cells...)
	}
	t.Foot("%s", p.verdict())
	return t.Write(w)
}

// verdict is the last line of a page.
func (p topTable) verdict() string {
	if p.view != top.Namespaces {
		return fmt.Sprintf("%d %s", len(p.rows), p.view.Plural())
	}
	verdict := top.NotInUse(p.serving)
	if len(p.rows) > 0 {
		fullest := p.rows[0]
		for _, r := range p.rows {
			if r.Share() > fullest.Share() {
				fullest = r
			}
		}
		verdict = fmt.Sprintf("fullest table: %s of %d entries, in %s", fullest.Use(), fullest.Max, escape.Text(fullest.Name))
		if p.serving != "" {
			verdict += "; " + p.serving
		}
	}
	return verdict
}
