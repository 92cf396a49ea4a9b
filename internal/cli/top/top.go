// Package top is the command that shows the use of conntrack.
package top

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
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
		Long: `Shows, for every network namespace in which conntrack is in use, how full its
table is and what was dropped, and renews the page until it is interrupted. In a
terminal, keys choose another view (Services, endpoints, sources of flows), the
order and a filter; the last line of the page names them. With -o json it prints an
array a line. Needs root.`,
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
			t := topPages{out: cmd.OutOrStdout(), warn: cmd.ErrOrStderr(), json: output == "json", once: once, terminal: progress.IsTerminal(cmd.OutOrStdout()), read: conntrack.ReadAll}
			return t.run(ctx, interval)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&interval, "interval", 2*time.Second, "time between two pages")
	f.BoolVar(&once, "once", false, "print one page and end")
	f.StringVarP(&output, "output", "o", "table", "table or json")
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
	terminal   bool // out is a terminal: pages are 80 columns wide, and each clears the previous one
	read       func(context.Context) ([]conntrack.Report, error)

	before map[uint64]conntrack.Report
	at     time.Time
	warned string
}

// topRow is one namespace of a page.
type topRow struct {
	Name string `json:"name"`
	conntrack.Report
	PerSecond   float64 `json:"entries_per_second"` // by how much the table grew
	DropsPerSec float64 `json:"drops_per_second"`

	compared bool // with the page before
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
	rows := t.rows(reports, time.Now())
	if t.json {
		if err := json.NewEncoder(t.out).Encode(rows); err != nil {
			return fmt.Errorf("write page: %w", err)
		}
	} else if err := t.print(rows); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	if err != nil && escape.OneLine(err) != t.warned {
		t.warned = escape.OneLine(err)
		fmt.Fprintf(t.warn, "spillway: %s\n", t.warned)
	}
	return nil
}

// rows sorts the fullest first, and compares with the page before.
func (t *topPages) rows(reports []conntrack.Report, now time.Time) []topRow {
	rows := make([]topRow, 0, len(reports))
	seen := make(map[uint64]conntrack.Report, len(reports))
	for _, r := range reports {
		row := topRow{Name: r.Namespace.String(), Report: r}
		if old, known := t.before[r.Namespace.Inode]; known {
			took := now.Sub(t.at).Seconds()
			row.compared = true
			row.PerSecond = float64(r.Entries-old.Entries) / took
			row.DropsPerSec = (float64(r.Counters.Drop) - float64(old.Counters.Drop)) / took
		}
		seen[r.Namespace.Inode] = r
		rows = append(rows, row)
	}
	t.before, t.at = seen, now
	slices.SortStableFunc(rows, func(a, b topRow) int { return cmp.Compare(b.Entries, a.Entries) })
	return rows
}

// shortName is how much of a name fits on a page of 80 columns.
const shortName = 22

// print prints a page. Counters count from the creation of the namespace.
func (t *topPages) print(rows []topRow) error {
	if !t.once && t.terminal {
		fmt.Fprint(t.out, "\x1b[H\x1b[2J")
	}
	width := shortName
	for i := range rows {
		if n := utf8.RuneCountInString(escape.Text(rows[i].Name)); !t.terminal {
			width = max(width, n)
		}
	}
	const format = "%-*.*s %8v %6v %7v %8v %7v %7v %6v\n"
	_, err := fmt.Fprintf(t.out, format, width, width, "NAMESPACE", "ENTRIES", "USE", "+/s", "DROPPED", "INSFAIL", "INVALID", "EXPECT")
	for _, r := range rows {
		use := "-"
		if r.Limits.Max > 0 {
			use = fmt.Sprintf("%.1f%%", 100*float64(r.Entries)/float64(r.Limits.Max))
		}
		growth, expect := "-", 0
		if r.compared {
			growth = fmt.Sprintf("%+.0f", r.PerSecond)
		}
		for _, n := range r.Expectations {
			expect += n
		}
		_, err = fmt.Fprintf(t.out, format, width, width, escape.Text(r.Name), r.Entries, use, growth,
			r.Counters.Drop, r.Counters.InsertFailed, r.Counters.Invalid, expect)
	}
	if len(rows) == 0 {
		_, err = fmt.Fprintln(t.out, "conntrack is in use in no network namespace")
	}
	return err
}
