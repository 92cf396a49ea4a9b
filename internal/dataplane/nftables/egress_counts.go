package nftables

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// egressCounts adds up what the rules of chain "egress" have counted. A rule that is written
// anew begins at 0; what was read of it before stays in the sum.
type egressCounts struct {
	exists atomic.Bool // a rule counts
	mu     sync.Mutex
	last   map[uint64]uint64 // packets, by the rule's handle
	total  map[model.Family]uint64
}

// follow notes whether the table has a rule that counts.
func (c *egressCounts) follow(t *table) {
	exists := false
	for i := range t.layout.common {
		exists = exists || t.exists[t.layout.common[i].egress.sources.Name]
	}
	c.exists.Store(exists)
}

// egressRules maps the rules that may count, by nft.Rule.Sum, to the family of their packets.
func egressRules() map[string]model.Family {
	rules, l := map[string]model.Family{}, newLayout()
	for i, f := range []model.Family{model.IPv4, model.IPv6} {
		for _, keeps := range []bool{false, true} {
			for _, addresses := range []bool{false, true} {
				rules[egressRule(&l.common[i], keeps, addresses).Sum()] = f
			}
		}
	}
	return rules
}

var egressDesc = prometheus.NewDesc("spillway_egress_connections_total",
	"Pods' connections to the outside that got the node's address and a random port from Spillway, instead of from the CNI.",
	[]string{"family"}, nil)

// collect reads the counters, and reports the sums. If the rules cannot be read, it reports what
// was read before.
func (c *egressCounts) collect(of nft.Table, ch chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.exists.Load() {
		c.read(of)
	}
	for f, n := range c.total {
		ch <- prometheus.MustNewConstMetric(egressDesc, prometheus.CounterValue, float64(n), f.String())
	}
}

func (c *egressCounts) read(of nft.Table) {
	var conn nft.Conn // the backend's is used by another goroutine
	defer conn.Close()
	rules, seen, more := egressRules(), map[uint64]uint64{}, map[model.Family]uint64{}
	_, err := conn.Rules(context.Background(), of, func(r nft.ListedRule) bool {
		f, counts := rules[r.Sum]
		if r.Chain != chainEgress || !counts {
			return true
		}
		n := r.Packets()
		seen[r.Handle] = n
		if was := c.last[r.Handle]; n >= was { // else it is another table's, of the same handle
			n -= was
		}
		more[f] += n
		return true
	})
	if err != nil {
		return
	}
	if c.total == nil {
		c.total = map[model.Family]uint64{}
	}
	for f, n := range more {
		c.total[f] += n
	}
	c.last = seen
}
