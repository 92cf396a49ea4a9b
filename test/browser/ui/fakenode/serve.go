package fakenode

import (
	"context"
	"errors"
	"net"
	"net/http"

	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// Serve serves the fake until the context ends. It closes the listener.
func (n *Node) Serve(ctx context.Context, listener net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle(nodev1alpha1connect.NewNodeServiceHandler(n))
	protocols := &http.Protocols{} // those of an agent
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{Handler: mux, Protocols: protocols, BaseContext: func(net.Listener) context.Context { return ctx }}
	context.AfterFunc(ctx, func() { _ = server.Close() }) // its listener is closed too
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
