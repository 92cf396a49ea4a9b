package otlp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploghttp"
	"go.opentelemetry.io/otel/log"
	sdklog "go.opentelemetry.io/otel/sdk/log"
	semconv "go.opentelemetry.io/otel/semconv/v1.40.0"
	collogs "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	"google.golang.org/protobuf/proto"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/observe/flowlog"
)

// scope names what the records come from.
const scope = "spillway.dev/spillway/flows"

// logExporter sends flow events as log records.
type logExporter struct {
	*signal
	all      *Exporter
	reader   *flowlog.Reader
	exporter sdklog.Exporter
	logger   log.Logger
	batch    *batch
	pause    time.Duration // batchPause
}

func newLogExporter(e *Exporter) (*logExporter, error) {
	s, client, err := e.signal("logs")
	if err != nil {
		return nil, err
	}
	// The SDK's batch processor is not used: it drops a batch that fails, and counts nothing.
	exporter, err := otlploghttp.New(context.Background(), otlploghttp.WithEndpointURL(s.url), otlploghttp.WithHTTPClient(client),
		otlploghttp.WithCompression(otlploghttp.GzipCompression), otlploghttp.WithRetry(otlploghttp.RetryConfig{}))
	if err != nil {
		return nil, fmt.Errorf("send flow events by OTLP: %w", err)
	}
	reader, err := e.cfg.Flows.Watch(flowlog.Filter{Kinds: e.cfg.FlowKinds}, time.Time{})
	if err != nil {
		return nil, err
	}
	l := &logExporter{signal: s, all: e, reader: reader, exporter: exporter, batch: &batch{}, pause: batchPause}
	provider := sdklog.NewLoggerProvider(sdklog.WithResource(e.resource), sdklog.WithProcessor(l.batch))
	l.logger = provider.Logger(scope, log.WithInstrumentationVersion(e.cfg.Version), log.WithSchemaURL(semconv.SchemaURL))
	return l, nil
}

// run sends events until ctx ends: at once if there were none for a while, else what comes in
// a second.
func (l *logExporter) run(ctx context.Context) {
	defer l.reader.Close()
	for {
		events, lost, err := l.reader.Next(ctx)
		if err != nil {
			return
		}
		l.count(missed, lost)
		l.batch.records = l.batch.records[:0]
		for i := range events {
			l.logger.Emit(ctx, record(&events[i]))
		}
		if len(events) > 0 && !l.deliver(ctx) || !sleep(ctx, l.pause) {
			return
		}
	}
}

// deliver sends the batch until the collector takes or rejects it. It returns false if ctx
// ended.
func (l *logExporter) deliver(ctx context.Context) bool {
	for {
		l.transport.last = answer{}
		err := l.exporter.Export(ctx, l.batch.records)
		if ctx.Err() != nil {
			return false
		}
		l.count(missed, l.reader.Missed())
		answer, n := &l.transport.last, uint64(len(l.batch.records))
		switch {
		case answer.delivered():
			refused, why := partial(answer.body)
			refused = min(refused, n)
			l.count(rejected, refused)
			l.count(delivered, n-refused)
			if refused == 0 {
				l.succeeded()
				return true
			}
			err = why
		case !answer.again():
			l.count(rejected, n)
		}
		err = cmp.Or(err, errNoReason)
		again := answer.again()
		if !sleep(ctx, l.failed(err)) {
			return false
		}
		if !again {
			return true
		}
	}
}

var errNoReason = errors.New("the collector gave no reason")

func (l *logExporter) count(outcome string, n uint64) {
	if n > 0 {
		l.all.records.WithLabelValues(outcome).Add(float64(n))
	}
}

// partial returns the number of records that a collector rejected of a request that it took.
// A body that cannot be read rejects none.
func partial(body []byte) (rejected uint64, why error) {
	var resp collogs.ExportLogsServiceResponse
	if proto.Unmarshal(body, &resp) != nil || resp.GetPartialSuccess().GetRejectedLogRecords() <= 0 {
		return 0, nil
	}
	return uint64(resp.PartialSuccess.RejectedLogRecords), fmt.Errorf("some records are rejected: %s", resp.PartialSuccess.ErrorMessage)
}

// batch has the records of a request: records of the SDK come from a Processor alone.
type batch struct{ records []sdklog.Record }

// Enabled implements sdklog.Processor.
func (b *batch) Enabled(context.Context, sdklog.EnabledParameters) bool { return true }

// OnEmit implements sdklog.Processor.
func (b *batch) OnEmit(_ context.Context, r *sdklog.Record) error {
	b.records = append(b.records, r.Clone())
	return nil
}

// Shutdown implements sdklog.Processor.
func (b *batch) Shutdown(context.Context) error { return nil }

// ForceFlush implements sdklog.Processor.
func (b *batch) ForceFlush(context.Context) error { return nil }

// record converts an event. docs/reference/flow-events.md lists the attributes.
func record(e *flowlog.Event) log.Record {
	var r log.Record
	r.SetEventName("spillway.flow." + e.Kind.String())
	r.SetTimestamp(e.Time)
	r.SetObservedTimestamp(time.Now())
	r.SetSeverity(log.SeverityInfo)
	r.SetSeverityText("INFO")
	if e.Kind == dataplane.FlowRefused || e.Kind == dataplane.FlowDropped {
		r.SetSeverity(log.SeverityWarn)
		r.SetSeverityText("WARN")
	}
	r.SetBody(log.StringValue(body(e)))
	r.AddAttributes(attributes(e)...)
	return r
}

func body(e *flowlog.Event) string {
	text := "flow " + e.Kind.String()
	if e.Reason != "" {
		text += ": " + e.Reason
	}
	if e.Flow.Service != "" {
		text += fmt.Sprintf(" (Service %s/%s)", e.Flow.Namespace, e.Flow.Service)
	}
	return text
}

// attributes returns those that are known.
func attributes(e *flowlog.Event) []log.KeyValue {
	f := &e.Flow
	a := attributeList{log.String(string(semconv.NetworkTransportKey), strings.ToLower(f.Protocol.String()))}
	if addr := f.ServiceAddress.Address.Addr(); addr.IsValid() {
		family := semconv.NetworkTypeIPv4
		if addr.Is6() {
			family = semconv.NetworkTypeIPv6
		}
		a = append(a, log.KeyValueFromAttribute(family))
	}
	a.address(semconv.SourceAddressKey, semconv.SourcePortKey, f.Client)
	a.owner("spillway.source.", f.Client.Owner)
	a.address(semconv.DestinationAddressKey, semconv.DestinationPortKey, f.ServiceAddress)
	a.text(semconv.K8SNamespaceNameKey, f.Namespace)
	a.text(semconv.K8SServiceNameKey, f.Service)
	a.text("spillway.service.port.name", f.PortName)
	a.address("spillway.endpoint.address", "spillway.endpoint.port", f.Endpoint)
	a.owner("spillway.endpoint.", f.Endpoint.Owner)
	a.text("spillway.flow.reason", e.Reason)
	a.text("spillway.flow.state", f.State)
	a = append(a, log.Bool("spillway.flow.by_socket", f.BySocket))
	if !f.Opened.IsZero() && f.LastSeen.After(f.Opened) {
		a.seconds("spillway.flow.duration", f.LastSeen.Sub(f.Opened))
	}
	a.seconds("spillway.flow.handshake", f.Handshake)
	a.seconds("spillway.flow.smoothed_rtt", f.SmoothedRTT)
	a.number("spillway.flow.bytes_to_endpoint", f.BytesToEndpoint)
	a.number("spillway.flow.bytes_to_client", f.BytesToClient)
	a.number("spillway.flow.packets_to_endpoint", f.PacketsToEndpoint)
	a.number("spillway.flow.packets_to_client", f.PacketsToClient)
	return a
}

type attributeList []log.KeyValue

func (a *attributeList) text(key attribute.Key, value string) {
	if value != "" {
		*a = append(*a, log.String(string(key), value))
	}
}

func (a *attributeList) address(addr, port attribute.Key, p flowlog.Peer) {
	if p.Address.IsValid() {
		*a = append(*a, log.String(string(addr), p.Address.Addr().String()), log.Int(string(port), int(p.Address.Port())))
	}
}

// owner adds the names of a Pod and a node, with the names of k8s.* after a prefix: the
// convention has them for one object alone.
func (a *attributeList) owner(prefix attribute.Key, o flowlog.Owner) {
	if namespace, pod, ok := strings.Cut(o.Pod, "/"); ok {
		a.text(prefix+semconv.K8SNamespaceNameKey, namespace)
		a.text(prefix+semconv.K8SPodNameKey, pod)
	}
	a.text(prefix+semconv.K8SNodeNameKey, o.Node)
}

func (a *attributeList) seconds(key string, d time.Duration) {
	if d > 0 {
		*a = append(*a, log.Float64(key, d.Seconds()))
	}
}

func (a *attributeList) number(key string, n uint64) {
	if n > 0 {
		*a = append(*a, log.Int64(key, int64(n)))
	}
}
