package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"
	"unicode"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/telemetry"
)

// InfluxConfig configures the push of metrics, if enabled.
type InfluxConfig struct {
	URL          string
	PasswordFile string
	TokenFile    string
	Interval     time.Duration
}

func (c *InfluxConfig) flags() []flag {
	return []flag{
		{name: "influx-url", to: at(&c.URL, ""),
			usage: "InfluxDB to push metrics to: http://[USER@]HOST:8086/write?db=NAME (1.x), " +
				"http://HOST:8086/api/v2/write?org=ORG&bucket=BUCKET (2.x)."},
		{name: "influx-password-file", to: at(&c.PasswordFile, ""),
			usage: "File with the password of the InfluxDB 1.x user that --influx-url names."},
		{name: "influx-token-file", to: at(&c.TokenFile, ""), usage: "File with the token for InfluxDB 2.x."},
		{name: "influx-interval", to: at(&c.Interval, 15*time.Second), usage: "Time between two pushes."},
	}
}

func (c *InfluxConfig) validate() error {
	if c.URL == "" {
		if c.TokenFile != "" {
			return cli.UsageErrorf("--influx-token-file without --influx-url: give both or none")
		}
		if c.PasswordFile != "" {
			return cli.UsageErrorf("--influx-password-file without --influx-url: give both or none")
		}
		return nil
	}
	if c.Interval < time.Second {
		return cli.UsageErrorf("--influx-interval %v: must be a second or longer", c.Interval)
	}
	hasUser, err := telemetry.CheckInfluxURL(c.URL)
	switch {
	case err != nil:
		return cli.UsageErrorf("--influx-url: %v", err)
	case hasUser && c.PasswordFile == "":
		return cli.UsageErrorf("--influx-url names a user: give --influx-password-file too")
	case !hasUser && c.PasswordFile != "":
		return cli.UsageErrorf("--influx-password-file: --influx-url names no user: write http://USER@HOST")
	case c.PasswordFile != "" && c.TokenFile != "":
		return cli.UsageErrorf("--influx-password-file and --influx-token-file: give one of the two")
	}
	return nil
}

// newInflux returns the push of metrics; nil if it is not enabled.
func newInflux(c InfluxConfig, node string, m *telemetry.Metrics, log *slog.Logger) (run func(context.Context) error, err error) {
	if c.URL == "" {
		return nil, nil
	}
	token, err := readSecret("--influx-token-file", c.TokenFile)
	if err != nil {
		return nil, err
	}
	password, err := readSecret("--influx-password-file", c.PasswordFile)
	if err != nil {
		return nil, err
	}
	i, err := telemetry.NewInflux(telemetry.InfluxConfig{
		URL: c.URL, Password: password, Token: token, Node: node, Interval: c.Interval, Gatherer: m.Gatherer(), Log: log,
	})
	if err != nil {
		return nil, err
	}
	if err := m.Register(i); err != nil {
		return nil, fmt.Errorf("register metrics of InfluxDB: %w", err)
	}
	return i.Run, nil
}

// maxSecret bounds a password or token: a file of another kind was given by mistake.
const maxSecret = 4 << 10

// readSecret reads a file that holds one line; "" for no file. The error never quotes it.
func readSecret(flag, path string) (string, error) {
	if path == "" {
		return "", nil
	}
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", flag, err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", flag, err)
	}
	secret := strings.TrimSpace(string(text))
	switch {
	case secret == "":
		return "", fmt.Errorf("read %s: %s is empty: write the secret to it", flag, path)
	case len(text) > maxSecret || strings.ContainsFunc(secret, unicode.IsControl):
		return "", fmt.Errorf("read %s: %s is not one line of text: write the secret to it, and nothing else", flag, path)
	}
	return secret, nil
}
