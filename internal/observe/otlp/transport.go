package otlp

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
)

const (
	// maxAnswer bounds an answer of the collector, and its header.
	maxAnswer = 64 << 10
	// maxHeaders bounds the file of headers: a file of another kind was given by mistake.
	maxHeaders = 16 << 10
)

// transport adds the headers of a file to requests, and notes the answer to the last one.
// The exporters of the SDK do not tell what the answer was.
type transport struct {
	base        http.RoundTripper
	headersFile string
	last        answer
}

type answer struct {
	sent       bool // false: the data could not be encoded
	status     int  // 0: none
	retryAfter time.Duration
	body       []byte
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	t.last = answer{sent: true}
	headers, err := readHeaders(t.headersFile)
	if err != nil {
		req.Body.Close()
		return nil, err
	}
	if len(headers) > 0 {
		req = req.Clone(req.Context())
		for name, values := range headers {
			req.Header[name] = values
		}
	}
	resp, err := t.base.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	resp.Body.Close()
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the answer: %w", err)
	case len(body) > maxAnswer:
		return nil, errors.New("read the answer: it is longer than 64 KiB")
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	t.last = answer{sent: true, status: resp.StatusCode, body: body}
	if n, err := strconv.ParseUint(resp.Header.Get("Retry-After"), 10, 16); err == nil {
		t.last.retryAfter = time.Duration(n) * time.Second
	}
	return resp, nil
}

// delivered reports whether the collector has taken the request.
func (a *answer) delivered() bool { return a.status/100 == 2 }

// again reports whether the same request may succeed later: the protocol lists the statuses.
func (a *answer) again() bool {
	switch a.status {
	case 0:
		return a.sent
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// readHeaders reads a file with a header a line. The error never quotes it.
func readHeaders(path string) (http.Header, error) {
	if path == "" {
		return nil, nil
	}
	text, err := readFile(path)
	if err != nil {
		return nil, fmt.Errorf("read --otlp-headers-file: %w", err)
	}
	headers := http.Header{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			continue
		}
		name, value, found := strings.Cut(line, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if !found || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return nil, fmt.Errorf("read --otlp-headers-file: line %d of %s is not a header: write one a line, as Name: value", n, path)
		}
		headers.Add(name, value)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read --otlp-headers-file: %s: %w", path, err)
	}
	return headers, nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxHeaders+1))
	if err == nil && len(text) > maxHeaders {
		err = fmt.Errorf("%s is longer than 16 KiB: write headers to it, and nothing else", path)
	}
	return text, err
}

// tlsConfig reads the files of c. The certificate is read again for each connection, so that
// it can be replaced.
func tlsConfig(c Config) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile != "" {
		text, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("read --otlp-ca-file: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("read --otlp-ca-file: %s has no certificate in PEM", c.CAFile)
		}
	}
	if c.CertFile == "" {
		return config, nil
	}
	load := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("read --otlp-cert-file and --otlp-key-file: %w", err)
		}
		return &pair, nil
	}
	if _, err := load(); err != nil {
		return nil, err
	}
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	return config, nil
}
