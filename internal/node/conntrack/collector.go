package conntrack

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Collector exports the conntrack metrics of a namespace under node_exporter's names, as
// gauges like there.
type Collector struct {
	open func() (*Conn, error)
}

// NewCollector makes a Collector for the process's own network namespace.
// Where the kernel has no conntrack it exports nothing.
func NewCollector() *Collector { return &Collector{open: Open} }

// scrapeTimeout bounds one reading; it takes microseconds.
const scrapeTimeout = 5 * time.Second

var (
	entriesDesc = nodeDesc("entries", "Entries in the connection tracking table.")
	limitDesc   = nodeDesc("entries_limit", "Maximum number of entries in the connection tracking table.")
	statDescs   = []struct {
		desc  *prometheus.Desc
		value func(Counters) uint64
	}{
		{statDesc("found", "Tuples that NAT wanted and found in use; NAT then tries another."), func(c Counters) uint64 { return c.Found }},
		{statDesc("invalid", "Packets that could not be tracked (INVALID)."), func(c Counters) uint64 { return c.Invalid }},
		{statDesc("insert", "Entries inserted; since Linux 5.10 only entries created over netlink."),
			func(c Counters) uint64 { return c.Insert }},
		{statDesc("insert_failed", "Entries that could not be inserted, which usually costs a packet: a race with an equal entry, or a "+
			"bucket that is too long."), func(c Counters) uint64 { return c.InsertFailed }},
		{statDesc("drop", "Packets dropped because their entry could not be created or inserted: a full table, or a lost race."),
			func(c Counters) uint64 { return c.Drop }},
		{statDesc("early_drop", "Entries evicted early because the table was full."), func(c Counters) uint64 { return c.EarlyDrop }},
		{statDesc("search_restart", "Lookups restarted because the table was resized."), func(c Counters) uint64 { return c.SearchRestart }},
		{statDesc("error", "Malformed packets."), func(c Counters) uint64 { return c.Error }},
		{statDesc("clash_resolve", "Races between equal entries that were resolved without a drop."),
			func(c Counters) uint64 { return c.ClashResolve }},
		{statDesc("chaintoolong", "Entries not inserted because their bucket was too long."), func(c Counters) uint64 { return c.ChainTooLong }},
	}
	expectDesc = prometheus.NewDesc("spillway_conntrack_expectations", "Connections that a conntrack helper expects, by helper.",
		[]string{"helper"}, nil)
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

// Collect implements prometheus.Collector. It omits values that cannot be read.
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
