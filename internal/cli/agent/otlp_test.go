package agent

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestOTLPFlags(t *testing.T) {
	const endpoint = "--otlp-endpoint=https://c.example:4318 "
	for args, want := range map[string]string{
		"":                                       "",
		"--otlp-signals=logs":                    "",
		"--otlp-insecure":                        "--otlp-insecure without --otlp-endpoint",
		"--otlp-headers-file=x":                  "--otlp-headers-file without --otlp-endpoint",
		endpoint:                                 "",
		endpoint + "--otlp-signals=metrics,logs": "",
		endpoint + "--otlp-signals=traces":       `--otlp-signals "traces": not a choice`,
		endpoint + "--otlp-signals=":             "--otlp-signals is empty",
		endpoint + "--otlp-metrics-interval=1ms": "--otlp-metrics-interval 1ms: must be a second or longer",
		endpoint + "--otlp-cert-file=x":          "--otlp-cert-file and --otlp-key-file: give both or none",
		"--otlp-endpoint=http://10.0.0.1:4318":   "--otlp-endpoint: http:// to another host",
		"--otlp-endpoint=http://10.0.0.1:4318 --otlp-insecure":   "",
		"--otlp-endpoint=http://127.0.0.1:4318":                  "",
		"--otlp-endpoint=http://127.0.0.1:4318 --otlp-ca-file=x": "are for https://",
		"--otlp-endpoint=https://user:hunter2@c.example --v=0":   "--otlp-headers-file",
		"--otlp-endpoint=https://c.example/?key=hunter2 --v=0":   "--otlp-headers-file",
	} {
		var c Config
		flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		c.AddFlags(flags)
		if err := flags.Parse(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		err := c.OTLP.validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%q: error %v, want %q", args, err, want)
		}
	}
}
