package nftables

import (
	"context"
	"fmt"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/node/nft"
)

// verdictDenied is the verdict of packets that a rule drops.
const verdictDenied = "denied"

// counterKey is the policy whose packets a rule counts, and the verdict for them: "untracked",
// "tracked" (allowed, by a policy that tracks) or verdictDenied.
type counterKey struct{ policy, verdict string }

// policyCounts adds up what the rules of the table have counted. A rule that is
// written anew begins at 0; what was read of it before stays in the sum.
type policyCounts struct {
	mu    sync.Mutex
	rules map[string]map[string]counterKey // of chains, by the sums of their rules
	last  map[countedRule]uint64           // as read last
	total map[counterKey]uint64
}

// countedRule is a rule that was read: its handle is used for no other.
type countedRule struct {
	chain, sum string
	handle     uint64
}

// follow replaces the rules. The sums of deleted policies are deleted too, so that there are
// never more sums than policies.
func (c *policyCounts) follow(t *doNotTrackTable) {
	rules, total := map[string]map[string]counterKey{}, map[counterKey]uint64{}
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, ch := range t.chains {
		for _, r := range ch.Rules {
			key, counts := t.counters[r]
			if !counts {
				continue
			}
			if rules[name] == nil {
				rules[name] = map[string]counterKey{}
			}
			total[key] = c.total[key]
			// No packet reaches the second of two equal rules.
			if sum := r.Sum(); rules[name][sum] == (counterKey{}) {
				rules[name][sum] = key
			}
		}
	}
	c.rules, c.total = rules, total
}

// add adds what the rules have counted since the last read.
func (c *policyCounts) add(seen map[countedRule]uint64) {
	for r, packets := range seen {
		if was := c.last[r]; packets >= was { // else it is another table's, of the same handle
			packets -= was
		}
		c.total[c.rules[r.chain][r.sum]] += packets
	}
	c.last = seen
}

var policyPacketsDesc = prometheus.NewDesc("spillway_do_not_track_packets_total",
	"Packets that a DoNotTrackPolicy has decided about: allowed untracked, allowed tracked or denied. One that several deny counts for "+
		"the first by name.",
	[]string{"policy", "verdict"}, nil)

// Describe implements prometheus.Collector.
func (p *Policies) Describe(ch chan<- *prometheus.Desc) { ch <- policyPacketsDesc }

// Collect implements prometheus.Collector. If the rules cannot be read, it reports what was
// read before.
func (p *Policies) Collect(ch chan<- prometheus.Metric) {
	p.counts.mu.Lock()
	defer p.counts.mu.Unlock()
	_ = p.readCounts(context.Background())
	for about, n := range p.counts.total {
		ch <- prometheus.MustNewConstMetric(policyPacketsDesc, prometheus.CounterValue, float64(n), about.policy, about.verdict)
	}
}

var _ dataplane.DenialCounter = (*Policies)(nil)

// Denials implements dataplane.DenialCounter.
func (p *Policies) Denials(ctx context.Context) (map[string]uint64, error) {
	p.counts.mu.Lock()
	defer p.counts.mu.Unlock()
	if err := p.readCounts(ctx); err != nil {
		return nil, fmt.Errorf("read counters of policies: %w", err)
	}
	denied := map[string]uint64{}
	for about, n := range p.counts.total {
		if about.verdict == verdictDenied {
			denied[about.policy] = n
		}
	}
	return denied, nil
}

// readCounts reads the rules of the table, if there are any. The caller holds counts.mu.
func (p *Policies) readCounts(ctx context.Context) error {
	c := &p.counts
	if len(c.rules) == 0 {
		return nil
	}
	var conn nft.Conn // the other one is used by another goroutine
	defer conn.Close()
	seen := map[countedRule]uint64{}
	_, err := conn.Rules(ctx, p.nftTable, func(r nft.ListedRule) bool {
		if _, counts := c.rules[r.Chain][r.Sum]; counts {
			seen[countedRule{r.Chain, r.Sum, r.Handle}] = r.Packets()
		}
		return true
	})
	if err == nil {
		c.add(seen)
	}
	return err
}
