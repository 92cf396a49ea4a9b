// Package ui is the command that serves a page about the agents of nodes.
package ui

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/docs"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/limitlistener"
	"spillway.dev/spillway/internal/observe/web"
	"spillway.dev/spillway/ui"
)

type options struct {
	listen  string
	remote  bool
	sockets []string
	cluster reach.Flags
}

// NewCommand returns the command ui.
func NewCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Serve a page with Services, flows, drops and findings of this node or of all",
		Long: `Serves a page on this machine and prints its address. The page shows the agent's node:
health, Services with their endpoints and rates, live flows and why each endpoint was
chosen, drops in words with their runbooks, and findings with fixes. The end of the
address is a key; a page of another site, or another user, cannot read without it. Runs
until it is interrupted. Needs the rights to the agent's socket, which is root's.

With --node or --all-nodes the page shows other nodes. Their agents are reached through
the API server, with the rights of a kubeconfig. Nodes that come and go do so on the page.`,
		Example: `  spillway ui
  spillway ui --all-nodes
  spillway ui --node node2 --listen 127.0.0.1:8900
  spillway ui --api-socket one=/tmp/one.sock --api-socket two=/tmp/two.sock`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", "127.0.0.1:0", "IP `address` and port of the page; port 0 is any free one.")
	f.BoolVar(&o.remote, "allow-remote", false, "Allow --listen on addresses that other machines reach. The page is not encrypted.")
	f.StringArrayVar(&o.sockets, "api-socket", []string{nodeclient.DefaultSocket},
		"Socket of an agent's API, as `[NAME=]PATH`; may be given several times. Without the flag, that of "+nodeclient.SocketVariable+".")
	o.cluster.AddNodes(f)
	return cmd
}

func (o *options) run(cmd *cobra.Command) error {
	addr, err := o.address()
	if err != nil {
		return err
	}
	ctx, stop := cli.UntilSignal(cmd.Context())
	defer stop()
	config := web.Config{Token: rand.Text(), Version: cli.Build().Version}
	if err := o.choose(ctx, cmd, &config); err != nil {
		return err
	}
	if config.Page, err = fs.Sub(ui.Dist, "dist"); err != nil {
		return err
	}
	if config.Runbooks, err = fs.Sub(docs.Runbooks, "runbooks"); err != nil {
		return err
	}
	if err := config.Validate(); err != nil {
		return err
	}
	listener, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(addr))
	if err != nil {
		return fmt.Errorf("listen on %s: %w: choose another address with --listen", addr, err)
	}
	limiter := limitlistener.New(limitlistener.Limits{Remote: 64, PerAddress: 32, Local: 64})
	server := &http.Server{
		Handler: web.Handler(config), BaseContext: func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
	}
	context.AfterFunc(ctx, func() { _ = server.Close() }) // its listener is closed too
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "http://%s/#token=%s\n", listener.Addr(), config.Token); err != nil {
		return err
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "spillway: open this address in a browser; Ctrl-C ends the page")
	if err := server.Serve(limiter.Listener(listener)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve page: %w", err)
	}
	return nil
}

// address is where to listen. Other machines reach it only if that was asked for.
func (o *options) address() (netip.AddrPort, error) {
	addr, err := netip.ParseAddrPort(o.listen)
	switch {
	case err != nil:
		return addr, cli.UsageErrorf("--listen %q: not an address and port: write one like 127.0.0.1:8900", o.listen)
	case !addr.Addr().IsLoopback() && !o.remote:
		return addr, cli.UsageErrorf("--listen %s: other machines reach this address: use 127.0.0.1, or also give --allow-remote", o.listen)
	}
	return addr, nil
}

// choose adds the nodes that the flags name.
func (o *options) choose(ctx context.Context, cmd *cobra.Command, config *web.Config) (err error) {
	if o.cluster.Local() {
		if err := o.cluster.Validate(cmd, false); err != nil {
			return err
		}
		config.Nodes, err = o.local(cmd.Flags().Changed("api-socket"))
		return err
	}
	nodes, err := o.cluster.Chosen(cmd)
	if err != nil {
		return err
	}
	r := remote{nodes, o.cluster.Timeout}
	if !nodes.All() {
		config.Nodes, err = r.chosen(ctx)
		return err
	}
	var lacks string
	if config.Nodes, lacks, err = r.list(ctx); err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	if lacks != "" {
		fmt.Fprintln(cmd.ErrOrStderr(), "spillway: "+reach.WithoutNodes)
	}
	config.Refresh = r.list
	return nil
}

func (o *options) local(given bool) ([]web.Node, error) {
	var nodes []web.Node
	sockets := o.sockets
	if path := os.Getenv(nodeclient.SocketVariable); path != "" && !given {
		sockets = []string{path}
	}
	for _, socket := range sockets {
		name, path, named := strings.Cut(socket, "=")
		if !named || strings.Contains(name, "/") {
			name, path = "", socket
		}
		if path == "" || strings.HasPrefix(socket, "=") {
			return nil, cli.UsageErrorf("--api-socket %q: not a socket: write PATH or NAME=PATH", socket)
		}
		nodes = append(nodes, web.Node{Name: name, Address: path, Dial: func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}})
	}
	if len(nodes) == 0 {
		return nil, cli.UsageErrorf("--api-socket: no socket given")
	}
	return nodes, nil
}
