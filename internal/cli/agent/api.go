package agent

import (
	"context"
	"log/slog"
	"path/filepath"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/node/instance"
	nodeapi "spillway.dev/spillway/internal/observe/server"
	"spillway.dev/spillway/internal/reconcile"
)

// APIConfig is the part of the command line for the agent's API.
type APIConfig struct {
	Socket   string
	Listen   string
	Cert     string
	Key      string
	ClientCA string
}

// apiPort is the port of --api-listen if it names none.
const apiPort = 10261

func (c *APIConfig) flags() []flag {
	return []flag{
		{name: "api-socket", to: at(&c.Socket, nodeclient.DefaultSocket),
			usage: "Unix socket of the read-only API, for root alone. With another --bpffs, the default has another name in the same " +
				"directory. Empty: not served."},
		{name: "api-listen", to: at(&c.Listen, ""),
			usage: "IP:port of the read-only API with mTLS, which needs the three flags below (default: not served)."},
		{name: "api-tls-cert", to: at(&c.Cert, ""), usage: "File with the certificate of --api-listen, in PEM."},
		{name: "api-tls-key", to: at(&c.Key, ""), usage: "File with the key of --api-tls-cert, in PEM."},
		{name: "api-client-ca", to: at(&c.ClientCA, ""),
			usage: "File with the authorities, in PEM, whose clients may use --api-listen. Every client of theirs may."},
	}
}

func (c *APIConfig) validate() (err error) {
	if c.Socket != "" {
		if err := nodeapi.CheckSocket(c.Socket); err != nil {
			return cli.UsageErrorf("--api-socket %q: %v", c.Socket, err)
		}
	}
	files := c.Cert != "" || c.Key != "" || c.ClientCA != ""
	switch {
	case c.Listen == "" && files:
		return cli.UsageErrorf("--api-tls-cert, --api-tls-key and --api-client-ca are for --api-listen: give it too, or none of them")
	case c.Listen == "":
		return nil
	case c.Cert == "" || c.Key == "" || c.ClientCA == "":
		return cli.UsageErrorf("--api-listen without mTLS is not served: give --api-tls-cert, --api-tls-key and --api-client-ca too")
	}
	c.Listen, err = bindAddress("--api-listen", c.Listen, apiPort)
	return err
}

// socket returns the path of the socket: agents of other instances on this machine, such as
// those of a lab, have their own.
func (c *APIConfig) socket(dir, bpffs string) string {
	switch {
	case c.Socket != nodeclient.DefaultSocket:
		return c.Socket
	case bpffs != defaultBPFFS:
		return instance.File(dir, bpffs, ".sock")
	}
	return filepath.Join(dir, filepath.Base(nodeclient.DefaultSocket))
}

// removeStale removes the socket that a killed agent of this instance has left.
func (c *APIConfig) removeStale(dir, bpffs string) {
	if path := c.socket(dir, bpffs); path != "" {
		nodeapi.RemoveStale(path)
	}
}

// newAPI returns the part of the agent that keeps the findings, and serves the API if it is enabled.
func (a *agent) newAPI(loop *reconcile.Reconciler, parts *kernelParts, events nodeapi.Events, findings *nodeapi.Findings,
	log *slog.Logger) (run func(context.Context) error, err error) {
	api, build := a.cfg.API, cli.Build()
	cfg := nodeapi.Config{
		Node: a.cfg.NodeName, Version: build.Version, Commit: build.Commit, ProxyMode: a.cfg.ProxyMode,
		State: loop, Backends: parts.backends, Events: events, OnProblems: loop.SetServerProblems, Findings: findings, Logger: log,
		Socket: api.socket(a.lockDir, a.cfg.EBPF.BPFFS),
	}
	cfg.Denials, _ = parts.policies.(dataplane.DenialCounter)
	if api.Listen != "" {
		cfg.TCP = nodeapi.TCP{Address: api.Listen, Cert: api.Cert, Key: api.Key, ClientCA: api.ClientCA}
	}
	s, err := nodeapi.New(cfg)
	if err != nil {
		return nil, err
	}
	return s.Run, nil
}
