package server

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// certificates reads the files of a TCP address again from time to time: certificates are
// replaced while the agent runs.
type certificates struct {
	TCP

	mu     sync.Mutex
	loaded *tls.Config // last good one
	read   time.Time   // when it was last tried
}

// rereadCertificates is the time after which the files are read again.
const rereadCertificates = 10 * time.Second

// config returns the configuration of a connection. Files that cannot be read leave the last
// good ones in use: a write of two files is not atomic.
func (c *certificates) config() (*tls.Config, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loaded != nil && time.Since(c.read) < rereadCertificates {
		return c.loaded, nil
	}
	c.read = time.Now()
	fresh, err := c.load()
	if err == nil {
		c.loaded = fresh
	}
	if c.loaded == nil {
		return nil, err
	}
	return c.loaded, nil
}

func (c *certificates) load() (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, fmt.Errorf("read --api-tls-cert and --api-tls-key: %w", err)
	}
	text, err := os.ReadFile(c.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("read --api-client-ca: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(text) {
		return nil, errors.New("read --api-client-ca: the file has no certificate")
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients,
		NextProtos: []string{"h2", "http/1.1"},
	}, nil
}
