package kube

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/facts/model"
)

// Collectors returns the metrics of the Source.
func (s *Source) Collectors() []prometheus.Collector {
	return []prometheus.Collector{prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "spillway_services_of_other_proxies",
		Help: "Services that this agent does not serve, because their label service.kubernetes.io/service-proxy-name leaves them to another " +
			"proxy. " +
			"If no such proxy runs, remove the label: kubectl get services -A -l service.kubernetes.io/service-proxy-name",
	}, func() float64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return float64(len(s.services.others))
	})}
}

// logOthers logs once that Services are left to another proxy, and again after there were
// none. Other programs may serve them, so it is no problem. The caller holds mu.
func (s *Source) logOthers() {
	n := len(s.services.others)
	if n > 0 && !s.othersLogged {
		first := slices.MinFunc(slices.Collect(maps.Keys(s.services.others)), model.Name.Compare)
		s.cfg.Logger.Info("services are not served: their label leaves them to another proxy", "label", proxyNameLabel, "services", n,
			"first", first.String())
	}
	s.othersLogged = n > 0
}
