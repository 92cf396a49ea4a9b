package kube

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"spillway.dev/spillway/internal/facts/model"
)

// accessPeriod is the time between two reads of the files of an Access. It is read, not
// watched: the files may be behind links, and on any file system.
var accessPeriod = 10 * time.Second

// accessParts are checksums of what clients keep from their start on. client-go reads tokens
// and client certificates in files of their own again, so these are left out.
type accessParts struct{ server, authority, credentials [sha256.Size]byte }

// parts reads the files of an Access.
func (a Access) parts() (p accessParts, err error) {
	cfg, err := a.config()
	if err != nil {
		return p, err
	}
	proxy, err := proxyOf(cfg)
	if err != nil {
		return p, err
	}
	authority := cfg.CAData
	if len(authority) == 0 && cfg.CAFile != "" {
		if authority, err = os.ReadFile(cfg.CAFile); err != nil {
			return p, err
		}
	}
	token := cfg.BearerToken
	if cfg.BearerTokenFile != "" {
		token = ""
	}
	p.server, err = checksum(cfg.Host, cfg.APIPath, proxy, cfg.ServerName)
	if err == nil {
		p.authority, err = checksum(authority, cfg.Insecure)
	}
	if err == nil {
		p.credentials, err = checksum(cfg.Username, cfg.Password, token, cfg.BearerTokenFile, cfg.Impersonate,
			cfg.CertData, cfg.KeyData, cfg.CertFile, cfg.KeyFile, cfg.AuthProvider, cfg.ExecProvider)
	}
	return p, err
}

// proxyOf returns the proxy of a kubeconfig, "" for none.
func proxyOf(cfg *rest.Config) (string, error) {
	if cfg.Proxy == nil {
		return "", nil
	}
	r, err := http.NewRequest(http.MethodGet, "https://"+host(cfg.Host), http.NoBody)
	if err != nil {
		return "", err
	}
	u, err := cfg.Proxy(r)
	if err != nil || u == nil {
		return "", err
	}
	return u.String(), nil
}

func checksum(values ...any) ([sha256.Size]byte, error) {
	text, err := json.Marshal(values)
	return sha256.Sum256(text), err
}

// names returns the names of the parts that differ.
func (p accessParts) names(q accessParts) (names []string) {
	for _, part := range []struct {
		differs bool
		name    string
	}{
		{p.server != q.server, "server"},
		{p.authority != q.authority, "certificate authority"},
		{p.credentials != q.credentials, "credentials"},
	} {
		if part.differs {
			names = append(names, part.name)
		}
	}
	return names
}

// accessFiles detects that the files of an Access have changed since its clients were made.
type accessFiles struct {
	access Access
	start  accessParts
	last   accessReading
	wrong  *model.Problem
}

// accessReading is a result of reading the files.
type accessReading struct {
	parts  accessParts
	failed bool
}

// newAccessFiles reads the files for the first time.
func newAccessFiles(a Access) (*accessFiles, error) {
	start, err := a.parts()
	return &accessFiles{access: a, start: start, last: accessReading{parts: start}}, err
}

// update takes a result of reading the files again, and reports whether the problem has
// changed. A change counts when two reads agree: a program may be writing.
func (f *accessFiles) update(parts accessParts, err error) (changed bool) {
	now := accessReading{parts, err != nil}
	again := now == f.last
	f.last = now
	if !again {
		return false
	}
	before := f.wrong
	f.wrong = nil
	if differ := strings.Join(parts.names(f.start), " and "); err != nil {
		f.wrong = f.problem(err.Error() + "; the agent keeps what it read at its start")
	} else if differ != "" {
		f.wrong = f.problem(fmt.Sprintf("has another %s than at the start of the agent, which does not follow that; restart the agent", differ))
	}
	return (before == nil) != (f.wrong == nil) || before != nil && *before != *f.wrong
}

func (f *accessFiles) problem(what string) *model.Problem {
	where := "account of the Pod"
	if f.access.Kubeconfig != "" {
		where = "kubeconfig " + f.access.Kubeconfig
	}
	return &model.Problem{Where: where, What: what}
}

// watchAccess reports when the files of the Access change, until ctx ends.
func (s *Source) watchAccess(ctx context.Context) {
	for sleep(ctx, accessPeriod) == nil {
		parts, err := s.access.access.parts() // may take long
		s.mu.Lock()
		if s.access.update(parts, err) {
			s.emit(model.Delta{})
		}
		s.mu.Unlock()
	}
}
