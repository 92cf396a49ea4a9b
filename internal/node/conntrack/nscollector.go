package conntrack

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// shownNamespaces is the number of network namespaces with their own series: a
	// node has some 110 pods. The others share the name below.
	shownNamespaces = 128
	otherNamespaces = "(others)"
	// readAgain is the age up to which a reading serves another scrape.
	readAgain = 2 * time.Second
)

// NamespaceCollector exports the conntrack metrics of many network namespaces. A node may
// have any number of namespaces, so the number of series is bounded. A namespace that
// appears when shownNamespaces have series counts among the others until it is deleted,
// even if one with series disappears. The caller's own and those with names come first.
type NamespaceCollector struct {
	list func() ([]Namespace, error)
	read func(context.Context, Namespace) (Report, error)

	mu     sync.Mutex
	at     time.Time
	seen   map[uint64]*watchedNamespace
	shown  map[string]*watchedNamespace // those with their own series, by name
	others Counters                     // sum of all namespaces without own series; it only grows
}

// watchedNamespace is the last state of a namespace in which conntrack is in use.
type watchedNamespace struct {
	Report
	name string // of its series; "": it counts among the others
}

// NewNamespaceCollector makes a collector for the namespaces that list finds.
func NewNamespaceCollector(list func() ([]Namespace, error)) *NamespaceCollector {
	return &NamespaceCollector{list: list, read: readCounts, seen: map[uint64]*watchedNamespace{}, shown: map[string]*watchedNamespace{}}
}

func namespaceDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("spillway_conntrack_namespace_"+name, help, []string{"netns"}, nil)
}

var (
	namespacesDesc        = prometheus.NewDesc("spillway_conntrack_namespaces", "Network namespaces in which conntrack is in use.", nil, nil)
	namespaceEntriesDesc  = namespaceDesc("entries", "Conntrack entries in a network namespace.")
	namespaceExpectsDesc  = namespaceDesc("expectations", "Connections that conntrack helpers expect in a network namespace.")
	namespaceCounterDescs = []struct {
		desc  *prometheus.Desc
		value func(Counters) uint64
	}{
		{namespaceDesc("drops_total", "Packets dropped because their entry could not be created or inserted: a full table, or a lost race."),
			func(c Counters) uint64 { return c.Drop }},
		{namespaceDesc("insert_failed_total", "Entries that could not be inserted: a lost race, or a bucket that is too long."),
			func(c Counters) uint64 { return c.InsertFailed }},
		{namespaceDesc("early_drops_total", "Entries evicted early because the table was full."), func(c Counters) uint64 { return c.EarlyDrop }},
		{namespaceDesc("invalid_total", "Packets that could not be tracked."), func(c Counters) uint64 { return c.Invalid }},
	}
)

// Describe implements prometheus.Collector.
func (c *NamespaceCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- namespacesDesc
	ch <- namespaceEntriesDesc
	ch <- namespaceExpectsDesc
	for _, d := range namespaceCounterDescs {
		ch <- d.desc
	}
}

// Collect implements prometheus.Collector.
func (c *NamespaceCollector) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.at) > readAgain {
		ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
		c.refresh(ctx)
		cancel()
		c.at = now
	}
	ch <- prometheus.MustNewConstMetric(namespacesDesc, prometheus.GaugeValue, float64(len(c.seen)))
	entries, expectations, hidden := 0, 0, false
	for _, w := range c.seen {
		waiting := 0
		for _, n := range w.Expectations {
			waiting += n
		}
		if w.name == "" {
			entries, expectations, hidden = entries+w.Entries, expectations+waiting, true
			continue
		}
		send(ch, w.name, w.Entries, waiting, w.Counters)
	}
	if hidden || c.others.Any() {
		send(ch, otherNamespaces, entries, expectations, c.others)
	}
}

func send(ch chan<- prometheus.Metric, name string, entries, expectations int, counters Counters) {
	ch <- prometheus.MustNewConstMetric(namespaceEntriesDesc, prometheus.GaugeValue, float64(entries), name)
	ch <- prometheus.MustNewConstMetric(namespaceExpectsDesc, prometheus.GaugeValue, float64(expectations), name)
	for _, d := range namespaceCounterDescs {
		ch <- prometheus.MustNewConstMetric(d.desc, prometheus.CounterValue, float64(d.value(counters)), name)
	}
}

// refresh reads all namespaces until ctx ends. A namespace that is not read keeps its last state.
func (c *NamespaceCollector) refresh(ctx context.Context) {
	list, _ := c.list()
	there := make(map[uint64]bool, len(list))
	for _, n := range list {
		there[n.Inode] = true
		if ctx.Err() != nil {
			continue
		}
		r, err := c.read(ctx, n)
		if errors.Is(err, os.ErrNotExist) {
			there[n.Inode] = false
		}
		if err == nil {
			c.update(r)
		}
	}
	for inode, w := range c.seen {
		if !there[inode] {
			delete(c.seen, inode)
			delete(c.shown, w.name)
		}
	}
}

// update stores a reading.
func (c *NamespaceCollector) update(r Report) {
	w := c.seen[r.Namespace.Inode]
	if w == nil {
		if !r.InUse() {
			return
		}
		w = &watchedNamespace{}
		c.seen[r.Namespace.Inode] = w
		c.show(w, r.Namespace)
	}
	if w.name == "" {
		c.others.add(r.Counters.since(w.Counters))
	}
	w.Report = r
}

// show gives a namespace its own series if there is room. One with a name takes the place of one
// that only processes have: a process makes as many of these as it likes.
func (c *NamespaceCollector) show(w *watchedNamespace, n Namespace) {
	if len(c.shown) == shownNamespaces && n.rank() < 2 {
		for name, other := range c.shown {
			if other.Namespace.rank() == 2 {
				delete(c.shown, name)
				other.name = ""
				break
			}
		}
	}
	if len(c.shown) == shownNamespaces {
		return
	}
	if w.name = n.String(); c.shown[w.name] != nil { // process names are unique with their number; bound names are not
		w.name = n.numbered()
	}
	c.shown[w.name] = w
}

// add adds d to c, field by field.
func (c *Counters) add(d Counters) {
	for kind := range uint16(16) {
		if f := c.field(kind); f != nil {
			*f += *d.field(kind)
		}
	}
}

// since returns the growth of the counters; 0 where a counter wrapped.
func (c Counters) since(before Counters) (growth Counters) {
	for kind := range uint16(16) {
		if f := growth.field(kind); f != nil && *c.field(kind) > *before.field(kind) {
			*f = *c.field(kind) - *before.field(kind)
		}
	}
	return growth
}
