package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/limitlistener"
	"spillway.dev/spillway/internal/node/instance"
)

// retry is the time between attempts to open a listener, and between looks at the socket's
// file.
const retry = 5 * time.Second

// Run serves until ctx ends, then returns nil. An address that cannot be opened is a Problem,
// and is tried again: the dataplane never depends on the API.
func (s *Server) Run(ctx context.Context) error {
	var listeners sync.WaitGroup
	listeners.Go(func() { s.followCounters(ctx) })
	listeners.Go(func() { s.followFindings(ctx) })
	if s.cfg.Socket != "" {
		listeners.Go(func() { s.keepOpen(ctx, unixSocket, s.openSocket) })
	}
	if s.cfg.TCP != (TCP{}) {
		listeners.Go(func() { s.keepOpen(ctx, tcpPort, s.openTCP) })
	}
	listeners.Wait()
	<-ctx.Done()
	return nil
}

// kind is a kind of listener; there is one of each.
type kind int

const (
	unixSocket kind = iota
	tcpPort
	kinds
)

// listener is an open address.
type listener struct {
	net.Listener
	tls   *tls.Config // nil: no TLS
	lost  func() bool // no client finds the listener any more; nil: cannot happen
	close func()
}

// keepOpen serves one address until ctx ends.
func (s *Server) keepOpen(ctx context.Context, k kind, open func(context.Context) (listener, error)) {
	for ctx.Err() == nil {
		l, err := open(ctx)
		if err == nil {
			s.log.Info("serving the API", "address", l.Addr().String())
			s.report(k, nil)
			err = s.serve(ctx, l)
			l.close()
		}
		if ctx.Err() == nil {
			s.report(k, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(s.cfg.retry):
		}
	}
}

// report passes on the Problems after that of one listener has changed. err is what is wrong
// with it, nil for nothing.
func (s *Server) report(k kind, err error) {
	var now model.Problem
	if err != nil {
		now = model.Problem{Where: "API of the agent", What: err.Error()}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problems[k] == now {
		return
	}
	s.problems[k] = now
	if s.cfg.OnProblems != nil {
		s.cfg.OnProblems(slices.DeleteFunc(slices.Clone(s.problems[:]), func(p model.Problem) bool { return p == model.Problem{} }))
	}
}

// serve answers requests until ctx ends or the listener fails or is lost.
func (s *Server) serve(ctx context.Context, l listener) error {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(l.tls != nil)
	protocols.SetUnencryptedHTTP2(l.tls == nil)
	srv := &http.Server{
		Handler: s.Handler(), Protocols: protocols, TLSConfig: l.tls,
		ReadHeaderTimeout: s.cfg.headerTimeout, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: maxRequests + maxStreams, SendPingTimeout: 30 * time.Second},
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	// A connection counts from its first packet on, before the handshake of TLS, which has the
	// time of ReadHeaderTimeout.
	// Only clients with a certificate, or root, have requests.
	limiter := limitlistener.New(limitlistener.Limits{Remote: maxConnections, PerAddress: maxPerAddress,
		Local: maxConnections, KeepRequests: true})
	srv.ConnState = limiter.State
	ended := make(chan error, 1)
	go func() {
		limited := limiter.Listener(l.Listener)
		if l.tls != nil {
			ended <- srv.ServeTLS(limited, "", "")
		} else {
			ended <- srv.Serve(limited)
		}
	}()
	defer srv.Close()
	tick := time.NewTicker(s.cfg.retry)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			return fmt.Errorf("serve on %s: %w", l.Addr(), err)
		case <-tick.C:
			if l.lost != nil && l.lost() {
				s.log.Warn("the socket of the API was removed; it is made again", "path", l.Addr().String())
				return nil
			}
		}
	}
}

// openSocket opens the Unix socket. Only the user that the agent runs as can connect: the
// socket gets its name after its mode.
func (s *Server) openSocket(context.Context) (listener, error) {
	l, err := openSocket(s.cfg.Socket)
	if err != nil {
		return listener{}, fmt.Errorf("%w: give another --api-socket, or an empty one", err)
	}
	return l, nil
}

func openSocket(path string) (listener, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return listener{}, fmt.Errorf("make the directory of the API's socket: %w", err)
	}
	// A socket does not show whether its agent still runs; the lock does.
	lock, err := instance.AcquireFile(path+".lock", path, "stop it")
	if err != nil {
		return listener{}, fmt.Errorf("lock the API's socket: %w", err)
	}
	if err := replaceable(path); err != nil {
		lock.Release()
		return listener{}, err
	}
	l, err := bind(dir, path)
	if err != nil {
		lock.Release()
		return listener{}, fmt.Errorf("listen on %s: %w", path, err)
	}
	own, err := os.Stat(path)
	isOwn := func() bool {
		now, err := os.Stat(path)
		return err == nil && os.SameFile(own, now)
	}
	remove := func() {
		if isOwn() {
			_ = os.Remove(path)
		}
		_ = l.Close()
		lock.Release()
	}
	if err != nil {
		remove()
		return listener{}, fmt.Errorf("listen on %s: %w", path, err)
	}
	return listener{Listener: named{l, path}, lost: func() bool { return !isOwn() }, close: remove}, nil
}

// named is a listener with the address under which clients find it.
type named struct {
	net.Listener
	path string
}

func (n named) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: n.path} }

// RemoveStale removes the socket of an agent that was killed, if the path has one.
func RemoveStale(path string) {
	lock, err := instance.AcquireFile(path+".lock", path, "stop it")
	if err != nil {
		return
	}
	defer lock.Release()
	if replaceable(path) == nil {
		_ = os.Remove(path)
	}
}

// replaceable returns nil if nothing has the path, or a socket on which no program listens.
func replaceable(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is not a socket, and stays", path)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil // of an agent that was killed
	}
	if err == nil {
		conn.Close()
	}
	return fmt.Errorf("another program listens on %s", path)
}

// bind makes the socket in a directory that other users cannot enter, and gives it its name
// when its mode is right. The name then replaces that of a killed agent's socket at once.
func bind(dir, path string) (net.Listener, error) {
	private, err := os.MkdirTemp(dir, ".api-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(private)
	first := filepath.Join(private, "s")
	l, err := net.Listen("unix", first)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(first, 0o600), os.Rename(first, path)); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// maxSocketPath is the kernel's limit (sun_path), without the final 0.
const maxSocketPath = 107

// CheckSocket returns an error if the kernel allows no socket of this path.
func CheckSocket(path string) error {
	if !filepath.IsAbs(path) {
		return errors.New("must be an absolute path")
	}
	if longest := max(len(path), len(filepath.Dir(path))+len("/.api-0123456789/s")); longest > maxSocketPath {
		return fmt.Errorf("too long for a Unix socket: use a directory of at most %d bytes", maxSocketPath-len("/.api-0123456789/s"))
	}
	return nil
}

// TCP is an address with mTLS.
type TCP struct {
	Address   string // IP:port
	Cert, Key string // files of the agent's certificate
	ClientCA  string // file of the authorities whose clients may connect
}

// Validate returns an error if a part is missing. It does not read the files.
func (t TCP) Validate() error {
	if missing := slices.Index([]string{t.Address, t.Cert, t.Key, t.ClientCA}, ""); missing >= 0 {
		return fmt.Errorf("TCP needs mTLS, and there is no %s", []string{"address", "certificate", "key", "client CA"}[missing])
	}
	return nil
}

// openTCP opens the TCP address. It fails if the certificate cannot be read.
func (s *Server) openTCP(ctx context.Context) (listener, error) {
	certs := &certificates{TCP: s.cfg.TCP}
	if _, err := certs.config(); err != nil {
		return listener{}, err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.TCP.Address)
	if err != nil {
		return listener{}, fmt.Errorf("%w: give another --api-listen", err)
	}
	return listener{Listener: l, close: func() { _ = l.Close() }, tls: &tls.Config{
		MinVersion:         tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return certs.config() },
	}}, nil
}
