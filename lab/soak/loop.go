package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"spillway.dev/spillway/lab/experiment/harness"
)

const (
	progressEvery = 10 * time.Second
	// warm is the time of load before the figures that depend on it are read.
	warm = 10 * time.Second
	// settleWithin is the time in which rules and map entries of earlier dataplanes must
	// be gone after the load has ended.
	settleWithin = 90 * time.Second
)

// soak runs the load and the actions, and compares the usage of the end with that of the start.
func (r *run) soak(ctx context.Context) error {
	start := make([]Usage, len(r.agents))
	for i, a := range r.agents {
		if err := a.static(ctx, &start[i]); err != nil {
			return err
		}
	}
	if err := r.startFlows(); err != nil {
		return err
	}
	r.ledger.restart()
	r.report.Began = time.Now()
	stop := make(chan struct{})
	defer close(stop)
	go r.ledger.watch(stop)
	go r.tick(stop)
	r.progress("load started: %d flows at %d places", len(r.ledger.flows), len(r.places))
	busy := cpuSeconds(filepath.Dir(r.cluster.Node(0).CgroupRoot))
	if err := r.wait(ctx, r.pause(warm)); err != nil {
		return err
	}
	for i, a := range r.agents {
		if err := a.dynamic(ctx, &start[i]); err != nil {
			return err
		}
	}
	if err := r.act(ctx); err != nil {
		return err
	}
	r.setCurrent("return to the first configuration")
	if err := r.restore(ctx); err != nil {
		return err
	}
	if err := r.wait(ctx, r.pause(warm)); err != nil {
		return err
	}
	end := make([]Usage, len(r.agents))
	for i, a := range r.agents {
		if err := a.dynamic(ctx, &end[i]); err != nil {
			return err
		}
	}
	r.report.CPU = (cpuSeconds(filepath.Dir(r.cluster.Node(0).CgroupRoot)) - busy) / time.Since(r.report.Began).Seconds()
	r.setCurrent("end the load")
	if err := r.endFlows(ctx); err != nil {
		return err
	}
	r.ledger.close()
	r.report.Ran = time.Since(r.report.Began).Round(time.Second)
	r.setCurrent("wait until the rules of other dataplanes are gone")
	return r.settle(ctx, start, end)
}

// act carries out actions until the time or the plan is over.
func (r *run) act(ctx context.Context) error {
	p := newPlan(r.cfg.Seed, r.kinds())
	for end := r.report.Began.Add(r.cfg.Duration); time.Now().Before(end); {
		if r.cfg.Steps > 0 && p.number >= r.cfg.Steps {
			return nil
		}
		a := p.next()
		if err := r.wait(ctx, r.pause(a.pause)); err != nil {
			return err
		}
		r.setCurrent(a.kind)
		r.mu.Lock()
		streams := len(r.open)
		r.report.Actions = a.number
		r.mu.Unlock()
		r.ledger.begin(a.number, a.kind, streams)
		began := time.Now()
		did, err := r.do(ctx, a)
		r.ledger.took(a.kind, time.Since(began))
		r.events.log("action %d %s: %s (%s)", a.number, a.kind, did, time.Since(began).Round(time.Millisecond))
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("action %d (%s): %w", a.number, a.kind, err)
		}
		if ctx.Err() != nil {
			return harness.EndError(ctx)
		}
		r.setCurrent("load alone")
	}
	return nil
}

// do carries out one action and returns what it did.
func (r *run) do(ctx context.Context, a action) (string, error) {
	d := rand.New(rand.NewPCG(a.seed, 1))
	if attack := attacks[a.kind]; attack != nil {
		from := r.attack[d.IntN(len(r.attack))]
		did, err := attack(r, d, from)
		return from.name + ": " + did, err
	}
	for _, k := range known {
		if k.name == a.kind {
			return k.do(r, ctx, d)
		}
	}
	return "", fmt.Errorf("no action is called %q", a.kind)
}

// wait waits, unless ctx or an agent ends.
func (r *run) wait(ctx context.Context, d time.Duration) error {
	select {
	case err := <-r.broken:
		return err
	case <-ctx.Done():
		return harness.EndError(ctx)
	case <-time.After(d):
		return nil
	}
}

// pause is the length of a pause in this run.
func (r *run) pause(d time.Duration) time.Duration {
	if r.cfg.quick {
		return d / 5
	}
	return d
}

func (r *run) setCurrent(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.current = what
}

// tick prints progress until stop is closed.
func (r *run) tick(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(progressEvery):
			r.progress("%s", r.line())
		}
	}
}

// line is the progress line.
func (r *run) line() string {
	lost, excused := r.ledger.totals()
	total := r.totals()
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Sprintf("%s  %d actions  %d connections  %d questions  %d lost  %d excused  now: %s",
		elapsed(time.Since(r.report.Began)), r.report.Actions, total.Connections, total.Questions, lost, excused, r.current)
}

func (r *run) totals() (sum counts) {
	for _, p := range r.places {
		sum.add(p.proc.totals())
	}
	return sum
}

// restore returns to the configuration of the start.
func (r *run) restore(ctx context.Context) error {
	done := r.allowMoves(webService)
	for _, s := range r.world.services {
		for i := range s.states {
			s.states[i] = ready
		}
	}
	r.world.restricted, r.world.untracked = nil, nil
	for _, a := range r.agents {
		if a.mode == r.cfg.Mode && a.binary == r.programs[0] {
			continue
		}
		a.use(r.cfg.Mode)
		a.binary = r.programs[0]
		if err := r.restart(ctx, a, sigterm); err != nil {
			return err
		}
	}
	defer done(settleMoves)
	return r.publish(ctx, 0, 1, 2)
}

// endFlows stops all flows and waits until each has its last answer, or has lost it.
func (r *run) endFlows(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Patience*3)
	defer cancel()
	ended := make(chan error)
	waiting := 0
	for _, p := range r.places {
		for _, f := range r.flowsOf(p) {
			waiting++
			go func() {
				_, err := p.proc.await(ctx, f.Name, order{Stop: f.Name})
				ended <- err
			}()
		}
	}
	var err error
	for range waiting {
		err = errors.Join(err, <-ended)
	}
	if err != nil {
		return fmt.Errorf("end the load: %w", err)
	}
	return r.wait(ctx, 1200*time.Millisecond) // clients report their counters each second
}

// settle waits until only the configuration's objects are left, and judges the growth.
func (r *run) settle(ctx context.Context, start, end []Usage) error {
	if err := r.flushConntrack(); err != nil {
		return err
	}
	for deadline := time.Now().Add(settleWithin); ; {
		over := false
		r.report.Growth = nil
		for i, a := range r.agents {
			if err := a.static(ctx, &end[i]); err != nil {
				return err
			}
			g := Growth{Start: start[i], End: end[i]}
			g.judge()
			over = over || len(g.Over) > 0
			r.report.Growth = append(r.report.Growth, g)
		}
		if !over || time.Now().After(deadline) {
			r.explainRules(ctx)
			return nil
		}
		if err := r.wait(ctx, 2*time.Second); err != nil {
			return err
		}
	}
}

// explainRules logs the rules of nodes that have too many.
func (r *run) explainRules(ctx context.Context) {
	for i, g := range r.report.Growth {
		if g.End.Rules > g.Start.Rules {
			text, err := r.agents[i].output(ctx, "nft", "list", "ruleset")
			r.events.log("rules of %s: %v\n%s", g.End.Node, err, text)
		}
	}
}
