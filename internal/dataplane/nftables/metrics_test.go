package nftables

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// kube-proxy counts the transactions that nf_tables refused. Spillway's name for them counts
// the same.
func TestRefusedBatchesHaveKubeProxysName(t *testing.T) {
	b := new(Backend)
	b.counts.batches.Store(5)
	b.counts.failures.Store(3)
	const name = "kubeproxy_sync_proxy_rules_nftables_sync_failures_total"
	want := "# HELP " + name + " The same as spillway_nftables_batch_failures_total, with kube-proxy's name.\n# TYPE " + name +
		" counter\n" + name + " 3\n"
	if err := testutil.CollectAndCompare(b, strings.NewReader(want), name); err != nil {
		t.Error(err)
	}
}
