package workload

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"spillway.dev/spillway/examples/rtb"
)

// ServeExchange runs the exchange of examples/rtb.
func ServeExchange(ctx context.Context, c Config) error {
	return servePages(ctx, c, rtb.NewExchange().Handler())
}

// ServeDSP runs a bidder of examples/rtb, which registers itself.
func ServeDSP(ctx context.Context, c Config) error {
	go rtb.Register(ctx, c.Exchange, c.Self, func(err error) { fmt.Fprintln(os.Stderr, err) })
	return servePages(ctx, c, rtb.DSP{Price: 0.5}.Handler())
}

func servePages(ctx context.Context, c Config, pages http.Handler) error {
	listeners, err := listenAll(c.Listen, func(e endpoint) (net.Listener, error) {
		var lc net.ListenConfig
		return lc.Listen(ctx, e.network("tcp"), e.addr.String())
	})
	if err != nil {
		return err
	}
	return serveAll(ctx, c, listeners, func(l net.Listener) error {
		server := http.Server{Handler: pages, ReadHeaderTimeout: 5 * time.Second}
		return server.Serve(l)
	})
}
