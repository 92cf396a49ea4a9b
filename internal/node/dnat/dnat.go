// Package dnat reports whether netfilter may translate destinations in a network
// namespace. Reasons are a pod's hostPort, the Services of another proxy, and a
// container's published port.
//
//	nf_tables' notifications ──> a rule that translates? ──┐
//	tables of legacy iptables, polled ─────────────────────┼──> changed(may, reason)
//	conntrack, where no rule translates ───────────────────┘
//
// A part that cannot be read counts as a translation. Source NAT does not count, since
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

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/nft"
)

// Config configures a Watcher. The zero value is usable.
type Config struct {
	// Translated reports whether conntrack has a connection whose destination netfilter
	// has translated. The Watcher calls it while no rule translates, at most every ten
	// seconds, in its network namespace. Nil: no such connections.
	Translated func(context.Context) (bool, error)
	// Poll is the interval of reading the tables of legacy iptables, which send no
	// notifications; 0: one second.
	Poll time.Duration
	// Recheck is the pause between the first two calls of Translated. It doubles up to
	// six times this value. 0: ten seconds.
	Recheck time.Duration
}

const (
	defaultPoll    = time.Second
	defaultRecheck = 10 * time.Second
	maxRechecks    = 6 // Config.Recheck times this is the longest pause
	// share bounds the CPU time of reading to 1/share of a core.
	share = 20
	// legacyReread is the interval of reading a legacy table of unchanged size: a rule
	// may have been replaced by another of the same size.
	legacyReread = 10 * time.Second
)

// Reasons for which netfilter may translate.
const (
	nftRules         = "a rule of nftables translates destinations"
	legacyRules      = "a rule of legacy iptables translates destinations"
	connectionsExist = "conntrack has connections with a translated destination"
	notRead          = "not read yet"
)

// Watcher watches one network namespace.
type Watcher struct {
	cfg     Config
	ns      netns.NsHandle
	changed func(may bool, reason string)
	nft     *nft.Watch
	stop    context.CancelFunc
	done    sync.WaitGroup
	kick    chan struct{}

	// Used only by update.
	legacy  []*legacyTable
	nextNft time.Time // the earliest time of the next reading of nf_tables
	nextCon time.Time // the same of the next call of Translated
	pause   time.Duration

	mu          sync.Mutex
	rules       string // why rules of nf_tables may translate; "": no rule does
	dirty       bool   // rules must be read again
	generation  uint64 // counts notifications that affect rules
	legacyRules string // why rules of legacy iptables may translate
	connections string // why connections may be translated
	ready       bool   // the first update is done
	may         bool   // last reported value
}

// legacyTable is table nat of one family.
type legacyTable struct {
	kernel.LegacyTable
	info   kernel.LegacyTableInfo
	next   time.Time // of the next reading, if info is the same
	reason string
}

// Watch starts a Watcher for the calling thread's network namespace. It calls changed
// with the current result before it returns, and then after each change until Close, one
// call at a time. reason is the reason why netfilter may translate.
func Watch(cfg Config, changed func(may bool, reason string)) (*Watcher, error) {
	if cfg.Poll == 0 {
		cfg.Poll = defaultPoll
	}
	if cfg.Recheck == 0 {
		cfg.Recheck = defaultRecheck
	}
	w := &Watcher{
		cfg: cfg, changed: changed, kick: make(chan struct{}, 1),
		rules: notRead, dirty: true, connections: notRead,
	}
	for _, v6 := range []bool{false, true} {
		w.legacy = append(w.legacy, &legacyTable{LegacyTable: kernel.LegacyTable{Name: "nat", V6: v6}})
	}
	var err error
	if w.ns, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("watch netfilter's rules: open own network namespace: %w", err)
	}
	// Subscribe before the first update, so that no change is missed.
	w.nft, err = nft.Follow(w.onNftUpdate)
	if err != nil && !errors.Is(err, unix.EPROTONOSUPPORT) { // a kernel without nfnetlink
		w.ns.Close()
		return nil, fmt.Errorf("watch netfilter's rules: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	w.stop = stop
	w.update(ctx)
	w.mu.Lock()
	w.ready = true
	w.may = w.reason() == "" // so that the first report is a change
	w.report()
	w.mu.Unlock()
	w.done.Go(func() { w.run(ctx) })
	return w, nil
}

// Close ends the watch. After it returns, changed is no longer called.
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
		w.update(ctx)
	}
}

// onNftUpdate handles notifications of nf_tables. A new rule that translates counts at
// once; after a deletion all rules are read again.
func (w *Watcher) onNftUpdate(changes []nft.Change, lost bool) {
	added, removed := false, false
	for _, c := range changes {
		switch c.Message {
		case unix.NFT_MSG_NEWRULE:
			added = added || nftRuleTranslates(nft.ReadRule(c.Object))
		case unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELTABLE:
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
		w.rules, w.dirty = "notifications of nftables were lost", true
	case added:
		w.rules = nftRules
	}
	w.dirty = w.dirty || removed
	w.resetConnections()
	w.report()
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// update reads every source that is due, and reports a changed result.
func (w *Watcher) update(ctx context.Context) {
	err := kernel.Do(w.ns, func() error {
		byRules := w.readNft(ctx, time.Now())
		if byRules = w.readLegacy() || byRules; !byRules {
			w.readConnections(ctx, time.Now())
		}
		return nil
	})
	if ctx.Err() != nil {
		return // the state may be incomplete
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.rules, w.dirty = err.Error(), true
	}
	w.resetConnections()
	w.report()
}

// resetConnections marks connections as not read while rules translate: translated
// connections may outlive the rules. The caller holds mu.
func (w *Watcher) resetConnections() {
	if w.rules != "" || w.legacyRules != "" {
		w.connections = notRead
	}
}

// readNft reads the rules of nf_tables if they may have changed, and reports whether a
// rule translates.
func (w *Watcher) readNft(ctx context.Context, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.dirty || now.Before(w.nextNft) {
		return w.rules != ""
	}
	w.dirty = false
	before := w.generation
	w.mu.Unlock()
	found, err := anyNftRuleTranslates(ctx)
	w.nextNft = time.Now().Add(max(w.cfg.Poll, share*time.Since(now)))
	w.mu.Lock()
	switch {
	case found:
		w.rules = nftRules
	case err != nil:
		w.rules, w.dirty = err.Error(), true
	case before != w.generation:
		w.dirty = true // a notification arrived during the dump
	default:
		w.rules = ""
	}
	return w.rules != ""
}

func anyNftRuleTranslates(ctx context.Context) (found bool, err error) {
	var conn nft.Conn
	defer conn.Close()
	for range 3 {
		interrupted, err := conn.Rules(ctx, nft.Table{}, func(r nft.ListedRule) bool {
			found = nftRuleTranslates(r)
			return !found
		})
		if found || !interrupted {
			return found, err
		}
	}
	return false, errors.New("rules of nf_tables change too fast to be read")
}

// readLegacy reads the tables of legacy iptables if they may have changed, and reports
// whether a rule of one may translate.
func (w *Watcher) readLegacy() bool {
	reason := ""
	for _, t := range w.legacy {
		t.reason = t.read(time.Now())
		reason = cmp.Or(reason, t.reason)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.legacyRules = reason
	return reason != ""
}

// read returns why a rule of the table may translate; "": no rule does.
func (t *legacyTable) read(now time.Time) string {
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
		t.info = kernel.LegacyTableInfo{} // read it again at the next update
		return err.Error()
	}
	t.info, t.next = info, time.Now().Add(max(legacyReread, share*time.Since(now)))
	if found {
		return legacyRules
	}
	return ""
}

// readConnections reads conntrack if no rule translates: connections that a deleted rule
// has translated continue.
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

// reason returns why netfilter may translate; "": it does not. The caller holds mu.
func (w *Watcher) reason() string {
	switch {
	case w.rules != "":
		return w.rules
	case w.legacyRules != "":
		return w.legacyRules
	}
	return w.connections
}

// report calls changed if the result has changed. The caller holds mu.
func (w *Watcher) report() {
	reason := w.reason()
	if may := reason != ""; w.ready && may != w.may {
		w.may = may
		w.changed(may, reason)
	}
}
