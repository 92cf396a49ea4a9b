package nftables

import (
	"encoding/binary"
	"sync"

	"github.com/mdlayher/netlink"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// counterKey is whose packets a rule of the table of policies counts, and what becomes of
// them: "untracked", "tracked" (allowed, by a policy that tracks) or "denied".
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

// follow takes over which rules there are now. What a policy that is gone has counted
// goes with it, so that there are never more sums than policies.
func (c *policyCounts) follow(t *policyTable) {
	rules, total := map[string]map[string]counterKey{}, map[counterKey]uint64{}
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, ch := range t.chains {
		for _, r := range ch.rules {
			if r.counts == (counterKey{}) {
				continue
			}
			if rules[name] == nil {
				rules[name] = map[string]counterKey{}
			}
			total[r.counts] = c.total[r.counts]
			// Of two alike no packet reaches the second.
			if sum := string(r.userData().get(udataRuleSum)); rules[name][sum] == (counterKey{}) {
				rules[name][sum] = r.counts
			}
		}
	}
	c.rules, c.total = rules, total
}

// read enters what one of our rules has counted.
func (c *policyCounts) read(seen map[countedRule]uint64, m netlink.Message) {
	var r countedRule
	packets := uint64(0)
	for typ, v := range attributes(m) {
		switch typ {
		case unix.NFTA_RULE_CHAIN:
			r.chain = cString(v)
		case unix.NFTA_RULE_HANDLE:
			r.handle = number64(v)
		case unix.NFTA_RULE_USERDATA:
			r.sum = string(udata(v).get(udataRuleSum))
		case unix.NFTA_RULE_EXPRESSIONS:
			packets = countedPackets(v)
		}
	}
	if _, ours := c.rules[r.chain][r.sum]; ours {
		seen[r] = packets
	}
}

// add adds what rules have counted since they were read last.
func (c *policyCounts) add(seen map[countedRule]uint64) {
	for r, packets := range seen {
		if was := c.last[r]; packets >= was { // else it is another table's, of the same handle
			packets -= was
		}
		c.total[c.rules[r.chain][r.sum]] += packets
	}
	c.last = seen
}

// countedPackets is what a rule's counter says.
func countedPackets(exprs []byte) (packets uint64) {
	for name, data := range expressions(exprs) {
		if name != "counter" {
			continue
		}
		for typ, v := range nested(data) {
			if typ == unix.NFTA_COUNTER_PACKETS {
				packets = number64(v)
			}
		}
	}
	return packets
}

func number64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

var policyPacketsDesc = prometheus.NewDesc("spillway_do_not_track_packets_total",
	"Packets that a DoNotTrackPolicy has decided about: allowed untracked, allowed tracked or denied. One that several deny counts for the first by name.",
	[]string{"policy", "verdict"}, nil)

// Describe implements prometheus.Collector.
func (p *Policies) Describe(ch chan<- *prometheus.Desc) { ch <- policyPacketsDesc }

// Collect implements prometheus.Collector. It reads the rules of the table, if there
// are any; what cannot be read is what was read before.
func (p *Policies) Collect(ch chan<- prometheus.Metric) {
	c := &p.counts
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.rules) > 0 {
		if s, err := dial(); err == nil {
			seen := map[countedRule]uint64{}
			if err := s.dump(unix.NFT_MSG_GETRULE, p.link.cfg.Table, unix.NFTA_RULE_TABLE, func(m netlink.Message) { c.read(seen, m) }); err == nil {
				c.add(seen)
			}
			s.close()
		}
	}
	for about, n := range c.total {
		ch <- prometheus.MustNewConstMetric(policyPacketsDesc, prometheus.CounterValue, float64(n), about.policy, about.verdict)
	}
}
