package main

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync/atomic"
	"time"

	"spillway.dev/spillway/internal/node/kubeproxy"
)

// takeover puts this agent in the place of a kube-proxy: when the agent serves
// and no kube-proxy runs any more, it takes kube-proxy's rules out of the
// kernel. Connections that they have translated go on (docs/takeover.md), as do
// those of a --proxy-mode before; it tends what is kept for them, by this run or an
// earlier one.
type takeover struct {
	wanted bool
	// netfilter says that this agent's own rules keep netfilter translating.
	netfilter bool
	log       *slog.Logger
	// pending: rules of kube-proxy may still translate new connections.
	pending atomic.Bool
	clean   bool // nothing of kube-proxy was found at the last look
	removed bool // by this run
	failed  bool // at the last look
	said    string
	running func() (sign string, err error) // kubeproxy.Running, but for tests
	// kept is told when connections of a --proxy-mode before are kept translated.
	kept chan struct{}
}

const stillRuns = "kube-proxy still runs here and would write its rules again: they are left, and this is tried again; stop it"

const (
	takeoverInterval = 2 * time.Second
	takeoverRetry    = 30 * time.Second // what failed may fail again, at some cost
	// natInterval is the time between two looks for connections that need
	// translation kept.
	natInterval = 10 * time.Second
	// maxTakeoverInterval is for looking whether somebody has undone it.
	maxTakeoverInterval = 5 * time.Minute
)

func newTakeover(c agentConfig, log *slog.Logger) *takeover {
	t := &takeover{wanted: c.Takeover != "", netfilter: modeUsesNetfilter(c.ProxyMode), log: log, running: kubeproxy.Running, kept: make(chan struct{}, 1)}
	t.pending.Store(t.wanted)
	return t
}

// translated is netfilterTranslates, in doubt while kube-proxy's rules are
// there: one more connection may be translated at any moment.
func (t *takeover) translated(ctx context.Context) (bool, error) {
	if t != nil && t.pending.Load() {
		return true, nil
	}
	return netfilterTranslates(ctx)
}

// keepTranslating is for when rules of a --proxy-mode before are about to go: the
// connections that they have translated go on, and a new one whose ports conntrack
// remembers is translated as it says. Nobody is to be kept for --cleanup (nil), or
// where this agent's own rules do it.
func (t *takeover) keepTranslating(ctx context.Context) error {
	if t == nil || t.netfilter {
		return nil
	}
	translated, err := netfilterTranslates(ctx)
	if err != nil || !translated {
		return err
	}
	if err := kubeproxy.KeepNAT(); err != nil {
		return err
	}
	select {
	case t.kept <- struct{}{}:
	default:
	}
	return nil
}

// run goes on until ctx ends.
func (t *takeover) run(ctx context.Context) {
	wait := takeoverInterval
	for {
		if t.wanted {
			t.look(ctx)
		}
		kept := t.tendNAT(ctx)
		switch {
		case !t.wanted && !kept:
			wait = math.MaxInt64
		case t.wanted && t.failed:
			wait = takeoverRetry
		case t.wanted && !t.clean:
			wait = takeoverInterval
		case kept:
			wait = natInterval
		default:
			wait = min(2*wait, maxTakeoverInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-t.kept:
			wait = natInterval
		case <-time.After(wait):
		}
	}
}

// look takes away what there is of kube-proxy, if it is time. Reading rules is
// the dear part, and comes last.
func (t *takeover) look(ctx context.Context) {
	wasClean := t.clean
	t.clean, t.failed = false, false
	sign, err := t.running()
	switch {
	case err != nil:
		t.say(slog.LevelWarn, "kube-proxy is not taken over", "err", err)
		return
	case sign != "":
		t.pending.Store(true)
		t.removed = false
		// Signs come and go while it ends, or is started again: once is enough.
		if !strings.HasPrefix(t.said, stillRuns) {
			t.say(slog.LevelWarn, stillRuns, "sign", sign)
		}
		return
	}
	left, err := kubeproxy.Detect(ctx)
	if ctx.Err() != nil {
		return
	}
	if t.failed = err != nil; t.failed {
		t.say(slog.LevelWarn, "kube-proxy cannot be taken over as a whole", "err", err)
	}
	t.clean = err == nil && left.Empty()
	t.pending.Store(!t.clean)
	switch {
	case t.clean && !t.removed:
		t.say(slog.LevelInfo, "nothing to take over", "reason", "nothing of kube-proxy is in the kernel")
	case left.Empty():
	case t.removed && wasClean:
		// Whoever has written them is at work, though not to be seen.
		t.wanted = false
		t.say(slog.LevelWarn, "kube-proxy's rules have come back, so it runs where this agent cannot see its process: they are left; "+
			"stop it and start this agent again, with hostPID in its Pod", "found", left.String())
	default:
		t.remove(ctx, left)
	}
}

// remove takes kube-proxy's rules away; what netfilter translates for running
// connections goes on.
func (t *takeover) remove(ctx context.Context, left kubeproxy.Installed) {
	if !t.netfilter {
		if err := kubeproxy.KeepNAT(); err != nil {
			t.failed = true
			t.say(slog.LevelWarn, "kube-proxy is not taken over: running connections would break", "err", err)
			return
		}
	}
	if err := left.Remove(ctx); err != nil {
		t.failed = true
		if ctx.Err() == nil {
			t.say(slog.LevelWarn, "not all of kube-proxy could be removed; this is tried again", "err", err)
		}
		return
	}
	t.removed = true
	t.say(slog.LevelInfo, "took over from kube-proxy", "removed", left.String())
}

// tendNAT lets go of what keeps translation going when no connection needs it,
// and reports whether it is still needed.
func (t *takeover) tendNAT(ctx context.Context) (kept bool) {
	kept, err := kubeproxy.NATKept()
	if err == nil && kept && !t.pending.Load() {
		if !t.netfilter {
			kept, err = netfilterTranslates(ctx)
		} else {
			kept = false
		}
		if err == nil && !kept {
			if err = kubeproxy.ReleaseNAT(); err == nil {
				t.log.Info("no connection that netfilter translates for Services is left; nothing is kept for it any more")
			}
		}
	}
	if err != nil && ctx.Err() == nil {
		t.log.Warn("Look after connections that netfilter translates", "err", err)
	}
	return kept || err != nil
}

// say logs how things stand, once: what it knows stands in what, as text.
func (t *takeover) say(level slog.Level, msg, key string, what any) {
	text := fmt.Sprint(what)
	if err, ok := what.(error); ok {
		text = oneLine(err)
	}
	if t.said == msg+text {
		return
	}
	t.said = msg + text
	t.log.Log(context.Background(), level, msg, key, text)
}
