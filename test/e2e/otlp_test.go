package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/process"
	"spillway.dev/spillway/test/testbed/topology"
)

// collectorConfig returns the collector's configuration in a document: its first block of
// YAML, unchanged.
func collectorConfig(t *testing.T, document string) []byte {
	t.Helper()
	text, err := os.ReadFile(document)
	must.Do(t, err)
	_, block, found := bytes.Cut(text, []byte("```yaml\nreceivers:"))
	block, _, ended := bytes.Cut(block, []byte("```"))
	if !found || !ended {
		t.Fatalf("%s has no block of YAML that begins with receivers", document)
	}
	return append([]byte("receivers:"), block...)
}

// startCollector runs the OpenTelemetry collector on a node, and returns what it prints.
func (e *env) startCollector(t *testing.T, node string, config []byte) (read func() string) {
	t.Helper()
	program, err := controlplane.Program("otelcol")
	must.Do(t, err)
	dir := t.TempDir()
	file, log := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "otelcol.log")
	must.Do(t, os.WriteFile(file, config, 0o600))
	p, err := process.Start(e.MustHost(t, node), log, []string{program, "--config", file})
	must.Do(t, err)
	t.Cleanup(p.Kill)
	read = func() string {
		text, err := os.ReadFile(log)
		must.Do(t, err)
		return string(text)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must.Do(t, p.Until(ctx, func(context.Context) error {
		if !strings.Contains(read(), "Everything is ready") {
			return fmt.Errorf("it has not started: %s", read())
		}
		return nil
	}))
	return read
}

// TestARealCollectorTakesEventsAndMetrics: an OpenTelemetry collector with the documented
// configuration prints the events that the API shows, and the values of the metrics.
func TestARealCollectorTakesEventsAndMetrics(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs a collector, which hack/peers otelcol builds")
	}
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{
		Spec: topology.DefaultSpec("e2e-otlp"),
		Flags: map[string][]string{"a": {"--flow-events", "all", "--flow-events-rate", "0", "--service-metrics", "all",
			"--otlp-endpoint", "http://127.0.0.1:4318", "--otlp-metrics-interval", "1s"}},
	})}
	printed := e.startCollector(t, "a", collectorConfig(t, "../../docs/how-to/opentelemetry.md"))
	s := e.Load(t, nodePort("a0", "b0"))
	client := flows.Flow{From: "client0", To: flows.NodePort("a")}
	e.askAnew(t, s, client, []flows.Combo{flows.TCP4, flows.UDP4, flows.TCP6}, 4, "")
	node := e.MustHost(t, "a")
	e.wantEvents(t, s.MustAddress(t, client.To, flows.TCP4), flows.TCP4, "closed", 4, printed)
	e.wantEvents(t, s.MustAddress(t, client.To, flows.TCP6), flows.TCP6, "opened", 4, printed)
	e.wantEvents(t, s.MustAddress(t, client.To, flows.UDP4), flows.UDP4, "answered", 4, printed)
	handshakes, err := agent.Metric(t.Context(), node, "spillway_service_handshake_duration_seconds_count", "")
	must.Do(t, err)
	waitFor(t, e.Agent("a"), "the handshakes in a reading", func() bool {
		return handshakes > 0 && sumOf(printed(), "spillway_service_handshake_duration_seconds", "Count") == handshakes
	})

	s.MustWrite(t, nodePort())
	s.MustWait(t)
	e.askAnew(t, s, client, []flows.Combo{flows.TCP4}, 3, "refused")
	e.wantEvents(t, s.MustAddress(t, client.To, flows.TCP4), flows.TCP4, "refused", 3, printed)
	waitFor(t, e.Agent("a"), "the refusals in a reading", func() bool {
		return sumOf(printed(), "spillway_service_refused_total", "Value") == 3
	})
	for _, outcome := range []string{"rejected", "missed"} {
		e.waitMetric(t, "spillway_otlp_records_total", fmt.Sprintf("outcome=%q", outcome), 0)
	}
}

// wantEvents waits until node a's API shows so many events of a kind at an address of a
// Service, and until the collector has printed the same ones with the same values.
func (e *env) wantEvents(t *testing.T, address string, combo flows.Combo, kind string, want int, printed func() string) {
	t.Helper()
	var shown map[string]attributes
	waitFor(t, e.Agent("a"), fmt.Sprintf("%d %s events of %s, %s", want, kind, address, combo), func() bool {
		shown = e.shownEvents(t, address, combo, kind)
		return len(shown) == want
	})
	client := e.Addr("client0", combo.IPv6()).String()
	for _, a := range shown {
		if a["source.address"] != client || kind == "closed" &&
			(a["spillway.flow.bytes_to_client"] == "" || a["spillway.endpoint.address"] == "") {
			t.Errorf("the API shows a %s event %v, want client %s", kind, a, client)
		}
	}
	var got map[string]attributes
	waitFor(t, e.Agent("a"), fmt.Sprintf("%d printed %s events of %s, %s", want, kind, address, combo), func() bool {
		got = printedEvents(printed(), address, combo, kind)
		return len(got) >= want
	})
	if !maps.EqualFunc(got, shown, maps.Equal) {
		t.Errorf("the collector printed %s events\n%v\nand the API shows\n%v", kind, got, shown)
	}
}

// attributes are those of a log record, as text.
type attributes map[string]string

// shownEvents returns the events that the API shows, by the client's port, as the attributes
// that docs/reference/flow-events.md lists.
func (e *env) shownEvents(t *testing.T, address string, combo flows.Combo, kind string) map[string]attributes {
	t.Helper()
	out := map[string]attributes{}
	lines := bufio.NewScanner(strings.NewReader(e.spillway(t, "a", "flows", "--since", "1h", "--event", kind, "-o", "json")))
	for lines.Scan() {
		var event nodev1alpha1.FlowEvent
		must.Do(t, protojson.Unmarshal(lines.Bytes(), &event))
		a := attributesOf(&event)
		if a.of(address, combo) {
			out[a["source.port"]] = a
		}
	}
	return out
}

// of returns whether a client asked this address.
func (a attributes) of(address string, combo flows.Combo) bool {
	return net.JoinHostPort(a["destination.address"], a["destination.port"]) == address && a["network.transport"] == combo.Protocol()
}

func attributesOf(e *nodev1alpha1.FlowEvent) attributes {
	f := e.Flow
	a := attributes{
		"network.transport":  strings.ToLower(strings.TrimPrefix(f.Protocol.String(), "PROTOCOL_")),
		"network.type":       "ipv4",
		"k8s.namespace.name": f.Namespace, "k8s.service.name": f.Service, "spillway.service.port.name": f.PortName,
		"spillway.flow.reason": e.Reason, "spillway.flow.state": f.State, "spillway.flow.by_socket": fmt.Sprint(f.BySocket),
	}
	if strings.Contains(f.ServiceAddress.Address, ":") {
		a["network.type"] = "ipv6"
	}
	for prefix, p := range map[string]*nodev1alpha1.Peer{"source": f.Client, "destination": f.ServiceAddress,
		"spillway.endpoint": f.Endpoint} {
		if p == nil {
			continue
		}
		a[prefix+".address"], a[prefix+".port"] = p.Address, fmt.Sprint(p.Port)
		if prefix == "source" {
			prefix = "spillway.source"
		}
		if namespace, pod, ok := strings.Cut(p.Pod, "/"); ok {
			a[prefix+".k8s.namespace.name"], a[prefix+".k8s.pod.name"] = namespace, pod
		}
		a[prefix+".k8s.node.name"] = p.Node
	}
	for name, n := range map[string]uint64{
		"bytes_to_endpoint": f.BytesToEndpoint, "bytes_to_client": f.BytesToClient,
		"packets_to_endpoint": f.PacketsToEndpoint, "packets_to_client": f.PacketsToClient,
	} {
		a["spillway.flow."+name] = fmt.Sprint(n)
	}
	lasted := f.LastSeen.AsTime().Sub(f.Opened.AsTime())
	if f.Opened == nil {
		lasted = 0
	}
	for name, d := range map[string]time.Duration{"duration": lasted, "handshake": f.Handshake.AsDuration(),
		"smoothed_rtt": f.SmoothedRtt.AsDuration()} {
		a["spillway.flow."+name] = fmt.Sprint(max(d, 0).Seconds())
	}
	maps.DeleteFunc(a, func(_, value string) bool { return value == "" || value == "0" })
	return a
}

// attributeLine is a line of the debug exporter.
var attributeLine = regexp.MustCompile(`(?m)^     -> (\S+): (Str|Int|Double|Bool)\((.*)\)$`)

// printedEvents returns the events that a collector has printed completely.
func printedEvents(text, address string, combo flows.Combo, kind string) map[string]attributes {
	out := map[string]attributes{}
	for _, record := range strings.Split(text, "\nLogRecord #")[1:] {
		record, _, complete := strings.Cut(record, "\nTrace ID:")
		if !complete || !strings.Contains(record, "\nEventName: spillway.flow."+kind+"\n") {
			continue
		}
		a := attributes{}
		for _, m := range attributeLine.FindAllStringSubmatch(record, -1) {
			a[m[1]] = m[3]
			if m[2] == "Double" { // the exporter rounds none, but writes 1e-05 in its own way
				value, _ := strconv.ParseFloat(m[3], 64)
				a[m[1]] = fmt.Sprint(value)
			}
		}
		if a.of(address, combo) {
			out[a["source.port"]] = a
		}
	}
	return out
}

// sumOf returns the sum of a field of a metric's data points in the last reading that a
// collector has printed.
func sumOf(text, metric, field string) (sum float64) {
	last := strings.LastIndex(text, "\n     -> Name: "+metric+"\n")
	if last < 0 {
		return 0
	}
	block, _, _ := strings.Cut(text[last:], "\nMetric #")
	for line := range strings.Lines(block) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), field+": "); ok {
			n, _ := strconv.ParseFloat(value, 64)
			sum += n
		}
	}
	return sum
}
