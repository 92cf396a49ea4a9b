package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

func TestOnlyTheOwnerCanUseTheSocket(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	h := start(t, func(c *Config) { c.Socket = filepath.Join(dir, "api.sock") })
	h.socket = h.cfg.Socket
	h.wait(t)
	for path, want := range map[string]os.FileMode{h.socket: os.ModeSocket | 0o600, dir: os.ModeDir | 0o700} {
		if info, err := os.Lstat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: mode %v (%v), want %v", path, info.Mode(), err, want)
		}
	}
	h.stop()
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestTheSocketOfAKilledAgentIsReplaced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	if err := os.WriteFile(socket+".lock", []byte("1 another\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := start(t, func(c *Config) { c.Socket = socket })
	h.socket = socket
	h.wait(t)
}

func TestRemoveStale(t *testing.T) {
	h := start(t, nil).wait(t)
	if RemoveStale(h.socket); h.wait(t) == nil {
		t.Error("the socket of a running agent is removed")
	}
	dir := t.TempDir()
	stale, file := filepath.Join(dir, "stale.sock"), filepath.Join(dir, "file")
	l, err := net.Listen("unix", stale)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{stale, file, filepath.Join(dir, "none"), "/does/not/exist"} {
		RemoveStale(path)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 || left[0].Name() != "file" {
		t.Errorf("left: %v", left)
	}
}

// wantProblem waits for a Problem with a text.
func (h *harness) wantProblem(t *testing.T, text string) {
	t.Helper()
	for p := range h.problems {
		if len(p) == 1 && strings.Contains(p[0].String(), text) {
			if strings.Contains(p[0].String(), "\n") {
				t.Errorf("more than one line: %s", p[0])
			}
			return
		}
		t.Logf("problems %v", p)
	}
}

func TestWhatHasThePathStays(t *testing.T) {
	dir := t.TempDir()
	file, live := filepath.Join(dir, "file"), filepath.Join(dir, "live.sock")
	if err := os.WriteFile(file, []byte("text"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", live) // of a program that knows no lock
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for path, want := range map[string]string{
		file:                          "is not a socket, and stays: give another --api-socket",
		live:                          "another program listens on " + live,
		filepath.Join(file, "x.sock"): "not a directory",
	} {
		start(t, func(c *Config) { c.Socket = path }).wantProblem(t, want)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "text" {
		t.Errorf("the file: %q, %v", text, err)
	}
	if _, err := os.Lstat(live); err != nil {
		t.Errorf("the live socket: %v", err)
	}
}

// TestASecondAgentWaitsForTheSocket: the first one serves on, and the second one takes over
// when it has ended.
func TestASecondAgentWaitsForTheSocket(t *testing.T) {
	first := start(t, func(c *Config) { c.Node = "first" }).wait(t)
	second := start(t, func(c *Config) { c.Node, c.Socket = "second", first.socket })
	second.wantProblem(t, "an agent runs already (process")
	if resp, err := first.client.Status(t.Context(), &nodev1alpha1.StatusRequest{}); err != nil || resp.Node != "first" {
		t.Errorf("the first: %v, %v", resp, err)
	}
	first.stop()
	await.True(t, "the second has the socket", func() bool {
		resp, err := second.client.Status(t.Context(), &nodev1alpha1.StatusRequest{})
		return err == nil && resp.Node == "second"
	})
	if p := <-second.problems; len(p) > 0 {
		t.Errorf("problems stay: %v", p)
	}
}

func TestARemovedSocketComesBack(t *testing.T) {
	h := start(t, nil).wait(t)
	if err := os.Remove(h.socket); err != nil {
		t.Fatal(err)
	}
	h.wait(t)
}

func TestSocketPaths(t *testing.T) {
	for path, want := range map[string]string{
		"/run/spillway/api.sock": "",
		"api.sock":               "absolute",
		"/" + strings.Repeat("d", 120) + "/s.sock": "too long",
		"/run/" + strings.Repeat("s", 103):         "too long",
	} {
		err := CheckSocket(path)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// authority signs certificates.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign(name, true)
	return a
}

func (a *authority) sign(name string, ca bool) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: ca, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for suffix, block := range map[string]*pem.Block{".crt": {Type: "CERTIFICATE", Bytes: der},
		".key": {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(a.file(name+suffix), pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	return cert, key
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// client is one with a certificate of an authority; nil: without one.
func (a *authority) client(of *authority) *http.Client {
	a.t.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	config := &tls.Config{RootCAs: roots}
	if of != nil {
		of.sign("client", false)
		pair, err := tls.LoadX509KeyPair(of.file("client.crt"), of.file("client.key"))
		if err != nil {
			a.t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}}
}

func TestTCPNeedsACertificateOfTheClientCA(t *testing.T) {
	own, other := newAuthority(t, "ca"), newAuthority(t, "other")
	own.sign("server", false)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	h := start(t, func(c *Config) {
		c.Socket = ""
		c.TCP = TCP{Address: addr, Cert: own.file("server.crt"), Key: own.file("server.key"), ClientCA: own.file("ca.crt")}
	})
	status := func(client *http.Client) error {
		_, err := nodev1alpha1connect.NewNodeServiceClient(client, "https://"+addr).Status(t.Context(), &nodev1alpha1.StatusRequest{})
		return err
	}
	good := own.client(own)
	await.True(t, "a client of the authority is served", func() bool { return status(good) == nil })
	for what, client := range map[string]*http.Client{"without a certificate": own.client(nil), "of another authority": own.client(other)} {
		if status(client) == nil {
			t.Errorf("a client %s is served", what)
		}
	}
	if resp, err := http.Get("http://" + addr + "/"); err == nil && resp.StatusCode == http.StatusOK {
		t.Error("a client without TLS is served")
	}
	h.stop()
}

func TestCertificatesThatCannotBeReadAreAProblem(t *testing.T) {
	a := newAuthority(t, "ca")
	a.sign("server", false)
	if err := os.WriteFile(a.file("empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for want, tcp := range map[string]TCP{
		"read --api-tls-cert and --api-tls-key": {Cert: a.file("none"), Key: a.file("server.key"), ClientCA: a.file("ca.crt")},
		"read --api-client-ca: open":            {Cert: a.file("server.crt"), Key: a.file("server.key"), ClientCA: a.file("none")},
		"the file has no certificate":           {Cert: a.file("server.crt"), Key: a.file("server.key"), ClientCA: a.file("empty")},
	} {
		tcp.Address = "127.0.0.1:0"
		start(t, func(c *Config) { c.Socket, c.TCP = "", tcp }).wantProblem(t, want)
	}
}

func TestReplacedCertificatesAreRead(t *testing.T) {
	a := newAuthority(t, "ca")
	first, _ := a.sign("server", false)
	c := &certificates{TCP: TCP{Cert: a.file("server.crt"), Key: a.file("server.key"), ClientCA: a.file("ca.crt")}}
	serial := func() *big.Int {
		t.Helper()
		config, err := c.config()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(config.Certificates[0].Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return cert.SerialNumber
	}
	if serial().Cmp(first.SerialNumber) != 0 {
		t.Error("another certificate")
	}
	if err := os.WriteFile(a.file("server.key"), nil, 0o600); err != nil { // half of a replacement
		t.Fatal(err)
	}
	c.read = time.Time{}
	if serial().Cmp(first.SerialNumber) != 0 {
		t.Error("the last good certificate is not used")
	}
	second, _ := a.sign("server", false)
	c.read = time.Time{}
	if serial().Cmp(second.SerialNumber) != 0 {
		t.Error("the replaced certificate is not read")
	}
}

func TestConfig(t *testing.T) {
	full := TCP{Address: "127.0.0.1:1", Cert: "c", Key: "k", ClientCA: "a"}
	for want, c := range map[string]Config{
		"no state":       {},
		"no certificate": {State: &fakeState{}, TCP: TCP{Address: full.Address, Key: "k", ClientCA: "a"}},
		"no client CA":   {State: &fakeState{}, TCP: TCP{Address: full.Address, Cert: "c", Key: "k"}},
	} {
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	s, err := New(Config{State: &fakeState{}, TCP: full})
	if err != nil {
		t.Fatal(err)
	}
	s.report(unixSocket, nil) // nothing to report to
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
	var none []model.Problem
	s.cfg.OnProblems = func(p []model.Problem) { none = p }
	if s.report(tcpPort, nil); none != nil {
		t.Error("an unchanged list is passed on")
	}
}

// Connections that send nothing, and those whose handshake is done, do not keep a client out.
// The time of a handshake is not over here: it is no help.
func TestIdleConnectionsKeepNoClientOut(t *testing.T) {
	own := newAuthority(t, "ca")
	own.sign("server", false)
	for _, host := range []string{"127.0.0.1", "::1"} {
		t.Run(host, func(t *testing.T) {
			l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
			if err != nil {
				t.Fatal(err)
			}
			addr := l.Addr().String()
			l.Close()
			start(t, func(c *Config) {
				c.Socket, c.headerTimeout = "", time.Hour
				c.TCP = TCP{Address: addr, Cert: own.file("server.crt"), Key: own.file("server.key"), ClientCA: own.file("ca.crt")}
			})
			status := func() error {
				client := own.client(own)
				client.Transport.(*http.Transport).TLSClientConfig.ServerName = "127.0.0.1" // as the certificate says
				defer client.CloseIdleConnections()
				ctx, cancel := context.WithTimeout(t.Context(), await.Limit)
				defer cancel()
				_, err := nodev1alpha1connect.NewNodeServiceClient(client, "https://"+addr).Status(ctx, &nodev1alpha1.StatusRequest{})
				return err
			}
			await.NoError(t, status)
			for range 2 * maxConnections {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
			}
			if err := status(); err != nil {
				t.Errorf("among idle connections: %v", err)
			}
		})
	}
}
