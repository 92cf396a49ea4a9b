package otlp

import (
	"context"
	"fmt"
	"time"

	prombridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// metricExporter sends the metrics of the agent's registry.
type metricExporter struct {
	*signal
	all      *Exporter
	reader   *sdkmetric.ManualReader
	exporter sdkmetric.Exporter
}

func newMetricExporter(e *Exporter) (*metricExporter, error) {
	s, client, err := e.signal("metrics")
	if err != nil {
		return nil, err
	}
	exporter, err := otlpmetrichttp.New(context.Background(), otlpmetrichttp.WithEndpointURL(s.url), otlpmetrichttp.WithHTTPClient(client),
		otlpmetrichttp.WithCompression(otlpmetrichttp.GzipCompression), otlpmetrichttp.WithRetry(otlpmetrichttp.RetryConfig{}))
	if err != nil {
		return nil, fmt.Errorf("send metrics by OTLP: %w", err)
	}
	m := &metricExporter{
		signal: s, all: e, exporter: exporter,
		reader: sdkmetric.NewManualReader(sdkmetric.WithProducer(prombridge.NewMetricProducer(prombridge.WithGatherer(e.cfg.Metrics)))),
	}
	// The reader reads once it has a provider, which has no instruments of its own.
	sdkmetric.NewMeterProvider(sdkmetric.WithReader(m.reader), sdkmetric.WithResource(e.resource))
	return m, nil
}

// run sends a reading every interval. A failure makes the interval longer, not shorter.
func (m *metricExporter) run(ctx context.Context) {
	for wait := time.Duration(0); sleep(ctx, wait); {
		wait = m.all.cfg.Interval
		switch err := m.send(ctx); {
		case ctx.Err() != nil:
			return
		case err != nil:
			m.all.readings.WithLabelValues(failed).Inc()
			wait = max(wait, m.failed(err))
		default:
			m.all.readings.WithLabelValues(delivered).Inc()
			m.succeeded()
		}
	}
}

func (m *metricExporter) send(ctx context.Context) error {
	var data metricdata.ResourceMetrics
	if err := m.reader.Collect(ctx, &data); err != nil { // the other metrics are still valid
		m.log.Debug("read metrics", "err", err)
	}
	m.transport.last = answer{}
	return m.exporter.Export(ctx, &data)
}
