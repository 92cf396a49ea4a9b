// Package takeover replaces a running kube-proxy by the agent, and keeps the connections
// that netfilter has translated until they end.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync/atomic"
	"time"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kubeproxy"
)

// Config configures a Takeover.
type Config struct {
	// Wanted removes the rules of kube-proxy once none runs. If false, Takeover only
	// keeps connections that a previous proxy mode translated.
	Wanted bool
	// Netfilter: this agent's own rules keep netfilter translating.
	Netfilter bool
	Log       *slog.Logger
}

// Takeover replaces a kube-proxy. When the agent serves and no kube-proxy runs any more,
// it removes kube-proxy's rules from the kernel. Connections that those rules have
// translated continue (docs/how-to/take-over-from-kube-proxy.md), as do connections of a previous --proxy-mode.
// Takeover keeps the kernel objects that they need, also for an earlier run. --cleanup uses
// a nil Takeover, which keeps nothing.
type Takeover struct {
	Config
	// pending: rules of kube-proxy may still translate new connections.
	pending atomic.Bool
	clean   bool // the last check found no kube-proxy
	removed bool // by this run
	failed  bool // in the last check
	logged  string
	running func() (sign string, err error) // kubeproxy.Running, except in tests
	// kept wakes Run after KeepTranslating has installed NAT hooks.
	kept chan struct{}
}

const stillRuns = "kube-proxy still runs here and would write its rules again. The agent leaves them and checks again: stop kube-proxy"

const (
	interval      = 2 * time.Second
	retryInterval = 30 * time.Second // retry slowly: a failure may repeat
	// natInterval is the time between two checks for connections that still need
	// translation.
	natInterval = 10 * time.Second
	// maxInterval is the time between checks whether another program has
	// written the rules again.
	maxInterval = 5 * time.Minute
)

// New prepares a Takeover; Run does the work.
func New(c Config) *Takeover {
	t := &Takeover{Config: c, running: kubeproxy.Running, kept: make(chan struct{}, 1)}
	t.pending.Store(c.Wanted)
	return t
}

// Translated reports whether netfilter translates any connection. It is true while
// rules of kube-proxy are in the kernel, which may translate the next connection.
func (t *Takeover) Translated(ctx context.Context) (bool, error) {
	if t != nil && t.pending.Load() {
		return true, nil
	}
	return netfilterTranslates(ctx)
}

// KeepTranslating is called before rules of a previous --proxy-mode are removed.
// Connections that the rules have translated continue. conntrack also applies an old entry
// to a new connection with the same ports. It does nothing for
// --cleanup (nil), or where this agent's own rules keep netfilter translating.
func (t *Takeover) KeepTranslating(ctx context.Context) error {
	if t == nil || t.Netfilter {
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

// Run works until ctx ends.
func (t *Takeover) Run(ctx context.Context) {
	wait := interval
	for ctx.Err() == nil {
		if t.Wanted {
			t.check(ctx)
		}
		kept := t.releaseUnusedNAT(ctx)
		switch {
		case !t.Wanted && !kept:
			wait = math.MaxInt64
		case t.Wanted && t.failed:
			wait = retryInterval
		case t.Wanted && !t.clean:
			wait = interval
		case kept:
			wait = natInterval
		default:
			wait = min(2*wait, maxInterval)
		}
		select {
		case <-ctx.Done():
		case <-t.kept:
			wait = natInterval
		case <-time.After(wait):
		}
	}
}

// check removes the rules of kube-proxy, if no kube-proxy runs. It reads the rules
// last, because that costs most.
func (t *Takeover) check(ctx context.Context) {
	wasClean := t.clean
	t.clean, t.failed = false, false
	sign, err := t.running()
	switch {
	case err != nil:
		t.logOnce(slog.LevelWarn, "kube-proxy is not taken over", "err", err)
		return
	case sign != "":
		t.pending.Store(true)
		t.removed = false
		// Signs appear and disappear while it ends or restarts: one is enough.
		if !strings.HasPrefix(t.logged, stillRuns) {
			t.logOnce(slog.LevelWarn, stillRuns, "sign", sign)
		}
		return
	}
	left, err := kubeproxy.Detect(ctx)
	if ctx.Err() != nil {
		return
	}
	if t.failed = err != nil; t.failed {
		t.logOnce(slog.LevelWarn, "some of kube-proxy's rules cannot be read or removed", "err", err)
	}
	t.clean = err == nil && left.Empty()
	t.pending.Store(!t.clean)
	switch {
	case t.clean && !t.removed:
		t.logOnce(slog.LevelInfo, "nothing to take over", "reason", "nothing of kube-proxy is in the kernel")
	case left.Empty():
	case t.removed && wasClean:
		// Another program writes them, in a PID namespace that this agent cannot see.
		t.Wanted = false
		t.logOnce(slog.LevelWarn, "kube-proxy's rules have come back, so it runs where this agent cannot see its process: they are left; "+
			"stop it and start this agent again, with hostPID in its Pod", "found", left.String())
	default:
		t.remove(ctx, left)
	}
}

// remove removes kube-proxy's rules. Netfilter continues to translate for running
// connections.
func (t *Takeover) remove(ctx context.Context, left kubeproxy.Installed) {
	if !t.Netfilter {
		if err := kubeproxy.KeepNAT(); err != nil {
			t.failed = true
			t.logOnce(slog.LevelWarn, "kube-proxy is not taken over: running connections would break", "err", err)
			return
		}
	}
	if err := left.Remove(ctx); err != nil {
		t.failed = true
		if ctx.Err() == nil {
			t.logOnce(slog.LevelWarn, "not all of kube-proxy could be removed; this is tried again", "err", err)
		}
		return
	}
	t.removed = true
	t.logOnce(slog.LevelInfo, "took over from kube-proxy", "removed", left.String())
}

// releaseUnusedNAT releases NAT's hooks when no connection needs them any more, and reports
// whether they are still needed.
func (t *Takeover) releaseUnusedNAT(ctx context.Context) (kept bool) {
	kept, err := kubeproxy.NATKept()
	if err == nil && kept && !t.pending.Load() {
		kept, err = t.releaseNAT(ctx)
	}
	if err != nil && ctx.Err() == nil {
		t.Log.Warn("cannot check for connections that netfilter translates", "err", err)
	}
	return kept || err != nil
}

// releaseNAT releases NAT's hooks, unless a connection needs them.
func (t *Takeover) releaseNAT(ctx context.Context) (kept bool, err error) {
	reason := "this agent's rules have hooks of their own"
	if !t.Netfilter {
		reason = "the last connection that netfilter translated for Services has ended"
		if kept, err := netfilterTranslates(ctx); kept || err != nil {
			return kept, err
		}
	}
	if err := kubeproxy.ReleaseNAT(); err != nil {
		return true, err
	}
	t.Log.Info("the NAT hooks of an earlier proxy mode are removed", "reason", reason)
	return false, nil
}

// logOnce logs a state once, until it changes.
func (t *Takeover) logOnce(level slog.Level, msg, key string, what any) {
	text := fmt.Sprint(what)
	if err, ok := what.(error); ok {
		text = escape.OneLine(err)
	}
	if t.logged == msg+text {
		return
	}
	t.logged = msg + text
	t.Log.Log(context.Background(), level, msg, key, text)
}

// netfilterTranslates reports whether netfilter translates the destination of any
// connection in the agent's network namespace, or only its source port. Netfilter
// changes only the port for a client that used the same port for a Service and for
// its endpoint.
func netfilterTranslates(ctx context.Context) (found bool, err error) {
	table, err := conntrack.Open()
	if errors.Is(err, conntrack.ErrUnsupported) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer table.Close()
	for _, status := range []conntrack.Status{conntrack.DstNAT, conntrack.SrcNAT} {
		err = table.Dump(ctx, conntrack.Filter{Status: status}, func(e *conntrack.Entry) bool {
			found = status == conntrack.DstNAT || e.Orig.Src.Addr() == e.Reply.Dst.Addr()
			return !found
		})
		if found || err != nil {
			break
		}
	}
	if errors.Is(err, conntrack.ErrUnsupported) {
		return false, nil
	}
	return found, err
}
