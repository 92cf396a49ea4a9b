package nftables

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// counts is what the backend has done.
type counts struct {
	batches, failures, bytes, repairs atomic.Uint64
}

var (
	// kube-proxy's name. Its failures to delete stale chains have one of their own: it
	// deletes them in a batch apart.
	syncFailuresDesc = prometheus.NewDesc("kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
		"The same as spillway_nftables_batch_failures_total, with kube-proxy's name.", nil, nil)
	batchesDesc = prometheus.NewDesc("spillway_nftables_batches_total",
		"Batches that nf_tables carried out.", nil, nil)
	failuresDesc = prometheus.NewDesc("spillway_nftables_batch_failures_total",
		"Batches that nf_tables refused, whole; each is followed by a comparison with the whole state.", nil, nil)
	bytesDesc = prometheus.NewDesc("spillway_nftables_batch_bytes_total",
		"Bytes of all batches carried out.", nil, nil)
	repairsDesc = prometheus.NewDesc("spillway_nftables_repairs_total",
		"Times that another program had changed the table, and it was repaired.", nil, nil)
)

// Describe implements prometheus.Collector.
func (b *Backend) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{batchesDesc, failuresDesc, syncFailuresDesc, bytesDesc, repairsDesc} {
		ch <- d
	}
	if !b.cfg.Beside { // the node's other dataplane has the pods' connections
		ch <- egressDesc
	}
}

// Collect implements prometheus.Collector.
func (b *Backend) Collect(ch chan<- prometheus.Metric) {
	for d, n := range map[*prometheus.Desc]*atomic.Uint64{
		batchesDesc: &b.counts.batches, failuresDesc: &b.counts.failures, syncFailuresDesc: &b.counts.failures, bytesDesc: &b.counts.bytes,
		repairsDesc: &b.counts.repairs,
	} {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n.Load()))
	}
	b.egress.collect(b.nftTable, ch)
}
