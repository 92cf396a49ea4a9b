// Package suite runs experiments one after the other. It reports an experiment that
// cannot run, marks a failed one, and continues with the rest.
package suite

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
)

// Config configures a run.
type Config struct {
	Options experiment.Options
	// Command and Versions are copied to the results.
	Command  []string
	Versions map[string]string
	// Only, if set, selects the rows to run.
	Only func(experiment, row string) bool
	// Share, if set, is called before each row that does not change values of the
	// whole machine, and blocks rows that do until release.
	Share func(ctx context.Context, waiting func()) (release func(), err error)
	// Disturbed, if set, is called before each row and notes other load on the machine.
	Disturbed func(context.Context) (note string)
	// Finished, if set, is called after each row with all results so far.
	Finished func(*experiment.Run)
}

// Run runs the experiments. When ctx ends, the remaining rows are marked "interrupted".
// The Run is nil only if nothing can run here. Failed rows are no error: see
// experiment.Run.Unfinished.
func Run(ctx context.Context, cfg Config, list []experiment.Experiment) (*experiment.Run, error) {
	machine, err := experiment.ReadMachine()
	if err != nil {
		return nil, err
	}
	s := &suite{cfg: cfg, run: &experiment.Run{Format: experiment.Format, Machine: machine,
		Versions: cfg.Versions, Command: cfg.Command, Quick: cfg.Options.Quick, Started: time.Now().UTC().Truncate(time.Second)}}
	rows := make([][]experiment.Row, len(list))
	for i, e := range list {
		rows[i] = s.wanted(e)
		for _, row := range rows[i] {
			s.plan.add(row.Takes)
		}
	}
	if s.plan.rows == 0 {
		return nil, errors.New("no row to run: see \"spillway-lab lab list\"")
	}
	stop := s.plan.show(cfg.Options.Progress)
	defer stop()
	for i, e := range list {
		if len(rows[i]) > 0 {
			s.experiment(ctx, e, rows[i])
		}
	}
	return s.run, nil
}

type suite struct {
	cfg  Config
	run  *experiment.Run
	plan plan
}

func (s *suite) wanted(e experiment.Experiment) []experiment.Row {
	var rows []experiment.Row
	for _, row := range e.Rows(s.cfg.Options) {
		if s.cfg.Only == nil || s.cfg.Only(e.Name, row.Name) {
			rows = append(rows, row)
		}
	}
	return rows
}

// experiment runs one experiment and adds its result.
func (s *suite) experiment(ctx context.Context, e experiment.Experiment, rows []experiment.Row) {
	res := experiment.Result{Name: e.Name, Title: e.Title, Question: e.Question, Published: e.Published,
		Sources: e.Sources, Figures: e.Figures, Charts: e.Charts}
	if e.Scale != nil {
		res.Scale = e.Scale(s.cfg.Options)
	}
	s.run.Results = append(s.run.Results, res)
	at := &s.run.Results[len(s.run.Results)-1]
	if err := harness.NeedPrograms(e.Packages); err != nil {
		at.Error = err.Error()
	}
	for _, row := range rows {
		s.plan.begin(row.Takes)
		var r experiment.RowResult
		if at.Error != "" {
			r = result(row, experiment.Failed)
			r.Error = at.Error
		} else {
			r = s.row(ctx, e, row)
		}
		var took time.Duration
		if r.Status == experiment.OK {
			took = time.Duration(r.Seconds * float64(time.Second))
		}
		s.plan.finish(row.Takes, took)
		at.Rows = append(at.Rows, r)
		if e.Conclude != nil {
			at.Conclusion = e.Conclude(at)
		}
		if e.Card != nil {
			at.Card = e.Card(at)
		}
		s.run.Seconds = time.Since(s.run.Started).Seconds()
		if s.cfg.Finished != nil {
			s.cfg.Finished(s.run)
		}
	}
}

func result(row experiment.Row, status string) experiment.RowResult {
	return experiment.RowResult{Name: row.Name, Table: row.Table, Group: row.Group, X: row.X, Side: row.Side,
		Published: row.Published, Status: status}
}

// row runs one row; an error of the row does not end the run.
func (s *suite) row(ctx context.Context, e experiment.Experiment, row experiment.Row) (r experiment.RowResult) {
	if ctx.Err() != nil {
		r = result(row, experiment.Interrupted)
		r.Error = "before it began"
		return r
	}
	if row.Needs != nil {
		if err := row.Needs(); err != nil {
			r = result(row, experiment.Failed)
			if errors.Is(err, experiment.ErrNotBuilt) {
				r.Status = experiment.NotBuilt
			}
			r.Error = strings.TrimPrefix(err.Error(), experiment.ErrNotBuilt.Error()+": ") // the status says that
			return r
		}
	}
	s.cfg.Options.Progress.Step("%s: %s", e.Name, row.Name)
	if s.cfg.Share != nil && !row.MachineWide {
		release, err := s.cfg.Share(ctx, func() {
			s.cfg.Options.Progress.Step("waiting for the end of an experiment that changes values of the machine")
		})
		if err != nil {
			r = result(row, experiment.Failed)
			if r.Error = err.Error(); ctx.Err() != nil {
				r.Status, r.Error = experiment.Interrupted, "before it began"
			}
			return r
		}
		defer release()
	}
	var m experiment.Measurement
	if s.cfg.Disturbed != nil {
		if note := s.cfg.Disturbed(ctx); note != "" {
			m.Note(note)
		}
	}
	started := time.Now()
	err := row.Run(ctx, &m)
	r = result(row, experiment.OK)
	r.Seconds = time.Since(started).Seconds()
	r.Samples, r.Series, r.Distribution, r.Notes = m.Samples, m.Series, m.Distribution, m.Notes
	for key, samples := range m.Samples {
		if r.Values == nil {
			r.Values = map[string]experiment.Summary{}
		}
		r.Values[key] = experiment.Summarize(samples)
	}
	switch {
	case ctx.Err() != nil:
		r.Status, r.Error = experiment.Interrupted, harness.EndError(ctx).Error()
		if err != nil && !errors.Is(err, ctx.Err()) && err.Error() != r.Error {
			r.Log = err.Error() // the cleanup may have failed
		}
	case err != nil:
		r.Status, r.Error, r.Log = experiment.Failed, err.Error(), strings.TrimSpace(m.Log)
	}
	return r
}

// Summary returns the result of a run in one line.
func Summary(r *experiment.Run) string {
	counts := map[string]int{}
	noted := 0
	for _, res := range r.Results {
		for _, row := range res.Rows {
			counts[row.Status]++
			if len(row.Notes) > 0 {
				noted++
			}
		}
	}
	var parts []string
	for _, status := range []string{experiment.OK, experiment.Failed, experiment.NotBuilt, experiment.Interrupted} {
		if counts[status] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", counts[status], status))
		}
	}
	text := "rows: " + strings.Join(parts, ", ")
	if noted > 0 {
		text += fmt.Sprintf("; %d with remarks: see the report", noted)
	}
	return text
}
