// Package top is the command that shows the use of conntrack.
package top

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/diagnosis/top"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/conntrack"
)

// NewCommand returns the command top.
func NewCommand() *cobra.Command {
	var interval time.Duration
	var once bool
	var output string
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the use of conntrack in every network namespace of this machine",
		Long: `Shows the use of the conntrack table and the drops of every network namespace in which
conntrack is in use, and refreshes the page until it is interrupted. In a terminal, keys
select another view (Services, endpoints, sources of flows), the order and a filter; the
last line of the page lists them. With -o json, each line is an array. Needs root.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cli.CheckOutput(output); err != nil {
				return err
			}
			if interval < 100*time.Millisecond {
				return cli.UsageErrorf("--interval %v: must be 100ms or longer", interval)
			}
			if err := cli.NeedRoot("read conntrack"); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if !once && output == "table" && progress.IsTerminal(cmd.OutOrStdout()) {
				return watchTop(ctx, interval)
			}
			t := topPages{out: cmd.OutOrStdout(), warn: cmd.ErrOrStderr(), json: output == "json", once: once, cut: progress.IsTerminal(cmd.OutOrStdout()), read: conntrack.ReadAll}
			return t.run(ctx, interval)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&interval, "interval", 2*time.Second, "Time between two pages.")
	f.BoolVar(&once, "once", false, "Print one page and exit.")
	f.StringVarP(&output, "output", "o", "table", "Output format: table or json.")
	return cmd
}

// watchTop shows the interactive view until the user quits.
func watchTop(ctx context.Context, interval time.Duration) error {
	c := top.NewCollector()
	ctx, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer stop()
	watching.Go(func() { c.Watch(ctx) })
	_, err := tea.NewProgram(top.NewModel(ctx, c.Read, interval), tea.WithContext(ctx), tea.WithoutSignalHandler()).Run()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("show terminal: %w", err)
	}
	return nil
}

// topPages prints pages one after the other.
type topPages struct {
	out, warn  io.Writer
	json, once bool
	cut        bool // names, so that a page is 80 columns wide
	read       func(context.Context) ([]conntrack.Report, error)

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
	reports, err := t.read(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if errors.Is(err, conntrack.ErrUnsupported) || errors.Is(err, conntrack.ErrNothingRead) {
		return err
	}
	write := t.print
	if t.json {
		write = t.encode
	}
	if err := write(t.collector.Compare(reports, time.Now())); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	if err != nil && escape.OneLine(err) != t.warned {
		t.warned = escape.OneLine(err)
		fmt.Fprintf(t.warn, "spillway: %s\n", t.warned)
	}
	return nil
}

// encode prints a page as an array in one line.
func (t *topPages) encode(rows []top.Row) error {
	type object struct {
		Name string `json:"name"`
		*conntrack.Report
		Rate   float64 `json:"entries_per_second"`
		PerSec float64 `json:"drops_per_second"`
	}
	list := make([]object, 0, len(rows))
	for _, r := range rows {
		list = append(list, object{r.Name, r.Report, r.Rate, r.PerSec})
	}
	return json.NewEncoder(t.out).Encode(list)
}

// shortName is the number of characters of a name that fit on a page of 80 columns.
const shortName = 22

// print prints a page. Counters count from the creation of the namespace.
func (t *topPages) print(rows []top.Row) error {
	width := shortName
	for _, r := range rows {
		if n := utf8.RuneCountInString(escape.Text(r.Name)); !t.cut {
			width = max(width, n)
		}
	}
	const format = "%-*.*s %8v %6v %7v %8v %7v %7v %6v\n"
	_, err := fmt.Fprintf(t.out, format, width, width, "NAMESPACE", "ENTRIES", "USE", "+/s", "DROPS", "INSFAIL", "INVALID", "EXPECT")
	for _, r := range rows {
		expect := 0
		for _, n := range r.Report.Expectations {
			expect += n
		}
		_, err = fmt.Fprintf(t.out, format, width, width, escape.Text(r.Name), r.Entries, r.Use(), r.Growth(),
			r.Drops, r.Report.Counters.InsertFailed, r.Report.Counters.Invalid, expect)
	}
	if len(rows) == 0 {
		_, err = fmt.Fprintln(t.out, "conntrack is in use in no network namespace")
	}
	return err
}
