package docs

import (
	"strings"
	"testing"
)

// kubeProxyMetrics are the metrics of kube-proxy 1.36.3 on Linux, from its
// pkg/proxy/metrics, and those that component-base adds about the program.
var kubeProxyMetrics = []string{
	"kubernetes_build_info",
	"kubernetes_feature_enabled",
	"kubeproxy_conntrack_reconciler_deleted_entries_total",
	"kubeproxy_conntrack_reconciler_sync_duration_seconds",
	"kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
	"kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
	"kubeproxy_network_programming_duration_seconds",
	"kubeproxy_proxy_healthz_total",
	"kubeproxy_proxy_livez_total",
	"kubeproxy_sync_full_proxy_rules_duration_seconds",
	"kubeproxy_sync_partial_proxy_rules_duration_seconds",
	"kubeproxy_sync_proxy_rules_duration_seconds",
	"kubeproxy_sync_proxy_rules_endpoint_changes_pending",
	"kubeproxy_sync_proxy_rules_endpoint_changes_total",
	"kubeproxy_sync_proxy_rules_iptables_last",
	"kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
	"kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
	"kubeproxy_sync_proxy_rules_iptables_total",
	"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
	"kubeproxy_sync_proxy_rules_last_timestamp_seconds",
	"kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total",
	"kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
	"kubeproxy_sync_proxy_rules_no_local_endpoints_total",
	"kubeproxy_sync_proxy_rules_service_changes_pending",
	"kubeproxy_sync_proxy_rules_service_changes_total",
	"rest_client_request_duration_seconds",
	"rest_client_requests_total",
}

// An operator whose alert asks for a metric of kube-proxy finds it, or the reason why it is
// missing.
func TestEveryMetricOfKubeProxyIsExportedOrExplained(t *testing.T) {
	docs := documents(t)
	exported, missing := docs["docs/reference/metrics.md"], docs["docs/how-to/monitor-in-kube-proxys-place.md"]
	for _, name := range kubeProxyMetrics {
		has, explained := strings.Contains(exported, "| `"+name+"`<br>"), strings.Contains(missing, "| `"+name+"` |")
		if has == explained {
			t.Errorf("%s: exported %v, named as missing %v", name, has, explained)
		}
	}
}
