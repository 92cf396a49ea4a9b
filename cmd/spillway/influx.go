package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/telemetry"
)

// influxConfig says where metrics are pushed, if anywhere.
type influxConfig struct {
	URL       string
	TokenFile string
	Interval  time.Duration
}

func (c *influxConfig) addFlags(f *pflag.FlagSet) {
	f.StringVar(&c.URL, "influx-url", "", "push metrics to this InfluxDB: http://HOST:8086/write?db=NAME (1.x), http://HOST:8086/api/v2/write?org=ORG&bucket=BUCKET (2.x)")
	f.StringVar(&c.TokenFile, "influx-token-file", "", "file with the token that InfluxDB 2.x asks for")
	f.DurationVar(&c.Interval, "influx-interval", 15*time.Second, "time between two pushes")
}

func (c *influxConfig) validate() error {
	if c.URL == "" {
		if c.TokenFile != "" {
			return usageErrorf("--influx-token-file without --influx-url: give both or none")
		}
		return nil
	}
	if c.Interval < time.Second {
		return usageErrorf("--influx-interval %v: must be a second or longer", c.Interval)
	}
	if err := telemetry.CheckInfluxURL(c.URL); err != nil {
		return usageErrorf("--influx-url: %v", err)
	}
	return nil
}

// newInflux prepares the push of metrics; nil if none is asked for.
func newInflux(c influxConfig, node string, m *telemetry.Metrics, log *slog.Logger) (run func(context.Context) error, err error) {
	if c.URL == "" {
		return nil, nil
	}
	token := ""
	if c.TokenFile != "" {
		text, err := os.ReadFile(c.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("read --influx-token-file: %w", err)
		}
		token = strings.TrimSpace(string(text))
	}
	i, err := telemetry.NewInflux(telemetry.InfluxConfig{
		URL: c.URL, Token: token, Node: node, Interval: c.Interval, Gatherer: m.Gatherer(), Log: log,
	})
	if err != nil {
		return nil, err
	}
	if err := m.Register(i); err != nil {
		return nil, fmt.Errorf("register metrics of InfluxDB: %w", err)
	}
	return i.Run, nil
}
