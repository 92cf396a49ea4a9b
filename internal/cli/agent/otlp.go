package agent

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/observe/otlp"
	nodeapi "spillway.dev/spillway/internal/observe/server"
	"spillway.dev/spillway/internal/telemetry"
)

// OTLPConfig is the part of the command line for an OpenTelemetry collector.
type OTLPConfig struct {
	Endpoint    string
	Signals     []string
	Interval    time.Duration
	Insecure    bool
	CAFile      string
	CertFile    string
	KeyFile     string
	HeadersFile string
}

// The choices of --otlp-signals.
var otlpSignals = []string{"logs", "metrics"}

func (c *OTLPConfig) flags() []flag {
	return []flag{
		{name: "otlp-endpoint", to: at(&c.Endpoint, ""),
			usage: "OpenTelemetry collector to send flow events and metrics to, by OTLP over HTTP: https://HOST:4318, or http://127.0.0.1:4318 " +
				"on this node (default: none)."},
		{name: "otlp-signals", to: at(&c.Signals, otlpSignals), choices: otlpSignals, open: true,
			usage: "What the collector gets, separated by commas: logs (flow events) and metrics."},
		{name: "otlp-metrics-interval", to: at(&c.Interval, time.Minute), usage: "Time between two readings of the metrics for the collector."},
		{name: "otlp-insecure", to: at(&c.Insecure, false),
			usage: "Allow http:// to a collector on another host. The data is then neither encrypted nor authenticated."},
		{name: "otlp-ca-file", to: at(&c.CAFile, ""),
			usage: "File with the authorities of the collector's certificate, in PEM (default: the system's)."},
		{name: "otlp-cert-file", to: at(&c.CertFile, ""), usage: "File with the client certificate for the collector, in PEM."},
		{name: "otlp-key-file", to: at(&c.KeyFile, ""), usage: "File with the key of --otlp-cert-file, in PEM."},
		{name: "otlp-headers-file", to: at(&c.HeadersFile, ""),
			usage: "File with headers of requests to the collector, such as a token: a line each, as Name: value."},
	}
}

func (c *OTLPConfig) validate() error {
	if c.Endpoint == "" {
		for _, other := range []struct {
			flag string
			set  bool
		}{
			{"--otlp-insecure", c.Insecure}, {"--otlp-ca-file", c.CAFile != ""}, {"--otlp-cert-file", c.CertFile != ""},
			{"--otlp-key-file", c.KeyFile != ""}, {"--otlp-headers-file", c.HeadersFile != ""},
		} {
			if other.set {
				return cli.UsageErrorf("%s without --otlp-endpoint: give both or none", other.flag)
			}
		}
		return nil
	}
	u, err := otlp.CheckEndpoint(c.Endpoint, c.Insecure)
	if err != nil {
		return cli.UsageErrorf("--otlp-endpoint: %v", err)
	}
	for _, s := range c.Signals {
		if !slices.Contains(otlpSignals, s) {
			return cli.UsageErrorf("--otlp-signals %q: not a choice: use logs, metrics or both", s)
		}
	}
	switch {
	case len(c.Signals) == 0:
		return cli.UsageErrorf("--otlp-signals is empty: use logs, metrics or both")
	case c.Interval < time.Second:
		return cli.UsageErrorf("--otlp-metrics-interval %v: must be a second or longer", c.Interval)
	case (c.CertFile == "") != (c.KeyFile == ""):
		return cli.UsageErrorf("--otlp-cert-file and --otlp-key-file: give both or none")
	case u.Scheme == "http" && (c.CAFile != "" || c.CertFile != ""):
		return cli.UsageErrorf("--otlp-ca-file and --otlp-cert-file are for https://: change --otlp-endpoint, or remove them")
	}
	return nil
}

// newOTLP returns the part that sends to a collector; nil if it is not enabled.
func (a *agent) newOTLP(events nodeapi.Events, m *telemetry.Metrics, log *slog.Logger) (run func(context.Context) error, err error) {
	c := a.cfg.OTLP
	if c.Endpoint == "" {
		return nil, nil
	}
	cfg := otlp.Config{
		Endpoint: c.Endpoint, Insecure: c.Insecure, CAFile: c.CAFile, CertFile: c.CertFile, KeyFile: c.KeyFile,
		HeadersFile: c.HeadersFile, Node: a.cfg.NodeName, Version: cli.Build().Version, Interval: c.Interval, Log: log,
	}
	if slices.Contains(c.Signals, "metrics") {
		cfg.Metrics = m.Gatherer()
	}
	if slices.Contains(c.Signals, "logs") {
		flows, ok := events.(nodeapi.FlowEvents)
		if !ok || flows.Mode == "off" {
			log.Warn("no flow events are sent by OTLP: this --proxy-mode reports none, or --flow-events is off", "proxy-mode", a.cfg.ProxyMode)
		} else {
			cfg.Flows = flows.Log
			if flows.Mode == ebpf.EventsOnDemand { // what a collector gets must not depend on who watches
				cfg.FlowKinds = []dataplane.FlowEventKind{dataplane.FlowRefused, dataplane.FlowDropped}
			}
		}
	}
	e, err := otlp.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("send to --otlp-endpoint: %w", err)
	}
	if err := m.Register(e); err != nil {
		return nil, fmt.Errorf("register metrics of OTLP: %w", err)
	}
	log.Info("sending to an OpenTelemetry collector", "endpoint", c.Endpoint, "signals", strings.Join(c.Signals, ","))
	return e.Run, nil
}
