package conntrack

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Collector gives a namespace's conntrack to Prometheus under the names that
// node_exporter has for it, as gauges like there.
type Collector struct {
	open func() (*Conn, error)
}

// NewCollector makes a Collector for the process's own network namespace.
// Where the kernel has no conntrack it gives nothing.
func NewCollector() *Collector { return &Collector{open: Open} }

// scrapeTimeout bounds one reading; it takes microseconds.
const scrapeTimeout = 5 * time.Second

var (
	entriesDesc = nodeDesc("entries", "Entries in the connection tracking table.")
	limitDesc   = nodeDesc("entries_limit", "Entries that the connection tracking table may hold.")
	statDescs   = []struct {
		desc  *prometheus.Desc
		value func(Counters) uint64
	}{
		{statDesc("found", "Lookups for a free tuple that found it in use."), func(c Counters) uint64 { return c.Found }},
		{statDesc("invalid", "Packets that could not be tracked."), func(c Counters) uint64 { return c.Invalid }},
		{statDesc("insert", "Entries inserted; since Linux 5.10 only those made over netlink."), func(c Counters) uint64 { return c.Insert }},
		{statDesc("insert_failed", "Entries that could not be inserted: a race with an equal one, or a chain too long."), func(c Counters) uint64 { return c.InsertFailed }},
		{statDesc("drop", "Packets dropped because their entry could not be made or inserted."), func(c Counters) uint64 { return c.Drop }},
		{statDesc("early_drop", "Entries evicted to make room in a full table."), func(c Counters) uint64 { return c.EarlyDrop }},
		{statDesc("search_restart", "Lookups begun again because the table was resized."), func(c Counters) uint64 { return c.SearchRestart }},
		{statDesc("error", "Malformed packets."), func(c Counters) uint64 { return c.Error }},
		{statDesc("clash_resolve", "Races between equal entries that cost no packet."), func(c Counters) uint64 { return c.ClashResolve }},
		{statDesc("chaintoolong", "Entries not inserted because their bucket is too long."), func(c Counters) uint64 { return c.ChainTooLong }},
	}
	expectDesc = prometheus.NewDesc("spillway_conntrack_expectations", "Connections that a conntrack helper expects.", []string{"helper"}, nil)
)

func nodeDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("node_nf_conntrack_"+name, help, nil, nil)
}

func statDesc(name, help string) *prometheus.Desc { return nodeDesc("stat_"+name, help) }

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- entriesDesc
	ch <- limitDesc
	ch <- expectDesc
	for _, s := range statDescs {
		ch <- s.desc
	}
}

// Collect implements prometheus.Collector. What cannot be read now is left out
// of this scrape.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	conn, err := c.open()
	if err != nil {
		return
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	if entries, limit, err := conn.Size(); err == nil {
		gauge(entriesDesc, float64(entries))
		gauge(limitDesc, float64(limit))
	}
	if sum, err := conn.Stats(ctx); err == nil {
		for _, s := range statDescs {
			gauge(s.desc, float64(s.value(sum)))
		}
	}
	if helpers, err := conn.Expectations(ctx); err == nil {
		for helper, n := range helpers {
			gauge(expectDesc, float64(n), helper)
		}
	}
}
