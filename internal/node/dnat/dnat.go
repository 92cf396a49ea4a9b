// Package dnat tells whether netfilter may translate destinations in a network
// namespace: for a pod's hostPort, for the Services of another proxy, for a container's
// published port.
//
//	nf_tables' notifications ──> a rule that translates? ──┐
//	tables of legacy iptables, polled ─────────────────────┼──> changed(may, reason)
//	conntrack, where no rule translates ───────────────────┘
//
// Whatever cannot be read counts as a translation. Source NAT alone does not count:
// every node with a CNI has it.
package dnat

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

// Config is how a Watcher works. The zero value is usable.
type Config struct {
	// Translated reports whether conntrack holds a connection whose destination
	// netfilter has translated. It is called while no rule translates, at most once in
	// ten seconds. It runs in the network namespace of the Watcher. Nil: there is none.
	Translated func(context.Context) (bool, error)
	// Poll is the time between two looks at the tables of legacy iptables, which tell
	// nothing of their changes by themselves; 0: one second.
	Poll time.Duration
	// Recheck is the time between the first two calls of Translated; it doubles up to
	// six times as long. 0: ten seconds.
	Recheck time.Duration
}

const (
	defaultPoll    = time.Second
	defaultRecheck = 10 * time.Second
	maxRechecks    = 6 // Config.Recheck times this is the longest pause
	// share bounds the part of a core that reading takes: one part in share.
	share = 20
	// legacyReread is how often a legacy table is read that has the same size as before:
	// a rule may have been replaced by another of the same size.
	legacyReread = 10 * time.Second
)

// Reasons for which netfilter may translate.
const (
	nftRules         = "a rule of nftables translates destinations"
	legacyRules      = "a rule of legacy iptables translates destinations"
	connectionsExist = "conntrack holds connections with a translated destination"
	notRead          = "not read yet"
)

// Watcher follows one network namespace.
type Watcher struct {
	cfg     Config
	ns      netns.NsHandle
	changed func(may bool, reason string)
	nft     *kernel.NftablesWatch
	stop    context.CancelFunc
	done    sync.WaitGroup
	kick    chan struct{}

	// Used by the goroutine that looks.
	legacy  []*legacyTable
	nextNft time.Time // the earliest time of the next reading of nf_tables
	nextCon time.Time // the same of the next call of Translated
	pause   time.Duration

	mu          sync.Mutex
	rules       string // why rules of nf_tables may translate; "": none does
	stale       bool   // rules is to be read again
	generation  uint64 // of news that bear on rules
	legacyRules string // why rules of legacy iptables may translate
	connections string // why connections may be translated
	ready       bool   // the first look is done
	may         bool   // reported last
}

// legacyTable is table nat of one family.
type legacyTable struct {
	kernel.LegacyTable
	info   kernel.LegacyTableInfo
	next   time.Time // of the next reading, if info is the same
	reason string
}

// Watch begins to follow the calling thread's network namespace. It calls changed with
// the present answer before it returns, then each time the answer changes, until Close;
// never twice at a time. reason says why netfilter may translate.
func Watch(cfg Config, changed func(may bool, reason string)) (*Watcher, error) {
	if cfg.Poll == 0 {
		cfg.Poll = defaultPoll
	}
	if cfg.Recheck == 0 {
		cfg.Recheck = defaultRecheck
	}
	w := &Watcher{
		cfg: cfg, changed: changed, kick: make(chan struct{}, 1),
		rules: notRead, stale: true, connections: notRead,
	}
	for _, v6 := range []bool{false, true} {
		w.legacy = append(w.legacy, &legacyTable{LegacyTable: kernel.LegacyTable{Name: "nat", V6: v6}})
	}
	var err error
	if w.ns, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("watch netfilter's rules: open own network namespace: %w", err)
	}
	// News first, so that no change falls between them and the first look.
	w.nft, err = kernel.FollowNftables(w.onNews)
	if err != nil && !errors.Is(err, unix.EPROTONOSUPPORT) { // a kernel without nfnetlink
		w.ns.Close()
		return nil, fmt.Errorf("watch netfilter's rules: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	w.stop = stop
	w.look(ctx)
	w.mu.Lock()
	w.ready = true
	w.may = w.reason() == "" // so that the first report is a change
	w.report()
	w.mu.Unlock()
	w.done.Go(func() { w.run(ctx) })
	return w, nil
}

// Close ends the watch. changed is not called any more when it returns.
func (w *Watcher) Close() error {
	w.stop()
	w.done.Wait()
	var err error
	if w.nft != nil {
		err = w.nft.Close()
	}
	return errors.Join(err, w.ns.Close())
}

func (w *Watcher) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.kick:
		case <-time.After(w.cfg.Poll):
		}
		w.look(ctx)
	}
}

// onNews judges what has changed in nf_tables. A rule that translates counts at once;
// when rules go, all are read again.
func (w *Watcher) onNews(news []kernel.News, lost bool) {
	added, removed := false, false
	for _, n := range news {
		switch message, ok := n.IsNftables(); {
		case !ok:
		case message == unix.NFT_MSG_NEWRULE:
			added = added || nftRuleTranslates(n.Data)
		case message == unix.NFT_MSG_DELRULE || message == unix.NFT_MSG_DELCHAIN || message == unix.NFT_MSG_DELTABLE:
			removed = true
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !lost && !added && (!removed || w.rules == "") {
		return
	}
	w.generation++
	switch {
	case lost:
		w.rules, w.stale = "changes of nftables came too fast to be followed", true
	case added:
		w.rules = nftRules
	}
	w.stale = w.stale || removed
	w.rulesTranslate()
	w.report()
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// look brings the answer up to date, as far as it is time to.
func (w *Watcher) look(ctx context.Context) {
	err := kernel.Do(w.ns, func() error {
		byRules := w.readNft(time.Now())
		if byRules = w.readLegacy() || byRules; !byRules {
			w.readConnections(ctx, time.Now())
		}
		return nil
	})
	if ctx.Err() != nil {
		return // what was read may be half of it
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.rules, w.stale = err.Error(), true
	}
	w.rulesTranslate()
	w.report()
}

// rulesTranslate notes, while rules translate, that connections may outlive them. The
// caller holds mu.
func (w *Watcher) rulesTranslate() {
	if w.rules != "" || w.legacyRules != "" {
		w.connections = notRead
	}
}

// readNft reads the rules of nf_tables if they may have changed, and reports whether
// any translates.
func (w *Watcher) readNft(now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.stale || now.Before(w.nextNft) {
		return w.rules != ""
	}
	w.stale = false
	before := w.generation
	w.mu.Unlock()
	found, err := anyNftRuleTranslates()
	w.nextNft = time.Now().Add(max(w.cfg.Poll, share*time.Since(now)))
	w.mu.Lock()
	switch {
	case found:
		w.rules = nftRules
	case err != nil:
		w.rules, w.stale = err.Error(), true
	case before != w.generation:
		w.stale = true // what was read is older than what was heard
	default:
		w.rules = ""
	}
	return w.rules != ""
}

func anyNftRuleTranslates() (found bool, err error) {
	for range 3 {
		err = kernel.EachNftRule(func(rule []byte) bool {
			found = nftRuleTranslates(rule)
			return !found
		})
		if found || !errors.Is(err, nl.ErrDumpInterrupted) {
			break
		}
	}
	return found, err
}

// readLegacy reads the tables of legacy iptables if they may have changed, and reports
// whether a rule of one may translate.
func (w *Watcher) readLegacy() bool {
	reason := ""
	for _, t := range w.legacy {
		t.reason = t.look(time.Now())
		reason = cmp.Or(reason, t.reason)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.legacyRules = reason
	return reason != ""
}

// look says why a rule of the table may translate; "": none does.
func (t *legacyTable) look(now time.Time) string {
	names, err := kernel.LegacyTables(t.V6)
	if err != nil {
		return err.Error()
	}
	if !slices.Contains(names, t.Name) {
		t.info = kernel.LegacyTableInfo{}
		return ""
	}
	info, err := t.Info()
	if err != nil {
		return err.Error()
	}
	if info == t.info && now.Before(t.next) {
		return t.reason
	}
	found := false
	failed := t.Read(func(entries []byte) {
		err = t.EachTarget(entries, func(target kernel.LegacyTarget) bool {
			found = targetTranslates(target.Name)
			return !found
		})
	})
	if err = errors.Join(failed, err); err != nil {
		t.info = kernel.LegacyTableInfo{} // read it again at the next look
		return err.Error()
	}
	t.info, t.next = info, time.Now().Add(max(legacyReread, share*time.Since(now)))
	if found {
		return legacyRules
	}
	return ""
}

// readConnections asks conntrack, where no rule translates any more: connections that
// rules have translated go on without them.
func (w *Watcher) readConnections(ctx context.Context, now time.Time) {
	w.mu.Lock()
	first := w.connections == notRead
	w.mu.Unlock()
	if first {
		w.pause, w.nextCon = w.cfg.Recheck, now
	}
	if now.Before(w.nextCon) {
		return
	}
	reason := ""
	if w.cfg.Translated != nil {
		found, err := w.cfg.Translated(ctx)
		switch {
		case err != nil:
			reason = err.Error()
		case found:
			reason = connectionsExist
		}
	}
	w.nextCon = time.Now().Add(max(w.pause, share*time.Since(now)))
	w.pause = min(2*w.pause, maxRechecks*w.cfg.Recheck)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.connections = reason
}

// reason says why netfilter may translate; "": it does not. The caller holds mu.
func (w *Watcher) reason() string {
	switch {
	case w.rules != "":
		return w.rules
	case w.legacyRules != "":
		return w.legacyRules
	}
	return w.connections
}

// report calls changed if the answer is another. The caller holds mu.
func (w *Watcher) report() {
	reason := w.reason()
	if may := reason != ""; w.ready && may != w.may {
		w.may = may
		w.changed(may, reason)
	}
}
