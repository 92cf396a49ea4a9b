// Package web serves the page of `spillway ui`, and forwards its calls to the agents.
//
// The page's files and the runbooks are public. Everything about a node needs the token,
// which only the printed address has. docs/explanation/security.md names the attackers.
package web

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// Node is an agent whose API the page may call.
type Node struct {
	// Name is shown until the agent reports the name of its node.
	Name string
	// Address describes for messages where the agent is, such as the path of its socket.
	Address string
	// Dial connects to the agent's API.
	Dial func(context.Context) (net.Conn, error)
}

// Config is what a Handler serves.
type Config struct {
	// Nodes are in the order in which the page shows them.
	Nodes []Node
	// Token is what a caller must know to read from a node.
	Token string
	// Version is that of the program.
	Version string
	// Page has index.html, app.js and other files of the page.
	Page fs.FS
	// Runbooks has NAME.md for each runbook.
	Runbooks fs.FS
}

// Validate returns what is missing.
func (c Config) Validate() error {
	switch {
	case len(c.Nodes) == 0:
		return errors.New("no node")
	case c.Token == "":
		return errors.New("no token")
	case c.Page == nil || c.Runbooks == nil:
		return errors.New("no files")
	}
	return nil
}

// policy lets the page load its own files and call its own server, and nothing else.
// Text from flows is hostile: no markup is made of strings (Trusted Types).
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Handler returns the server of a valid configuration.
func Handler(c Config) http.Handler {
	nodes := make([]*node, len(c.Nodes))
	for i, n := range c.Nodes {
		nodes[i] = newNode(n)
	}
	api := http.NewServeMux()
	api.HandleFunc("GET /api/nodes", func(w http.ResponseWriter, _ *http.Request) { writeNodes(w, c.Version, nodes) })
	api.HandleFunc("POST /api/node/{index}/"+nodev1alpha1connect.NodeServiceName+"/{method}", func(w http.ResponseWriter, r *http.Request) {
		i, err := strconv.Atoi(r.PathValue("index"))
		if err != nil || i < 0 || i >= len(nodes) {
			writeError(w, r, connect.CodeNotFound, "no such node: load the page again")
			return
		}
		http.StripPrefix("/api/node/"+r.PathValue("index"), nodes[i].proxy).ServeHTTP(w, r)
	})
	path, merged := nodev1alpha1connect.NewNodeServiceHandler(&merge{nodes: nodes})
	api.Handle("POST /api/nodes"+path, http.StripPrefix("/api/nodes", merged))

	mux := http.NewServeMux()
	mux.Handle("/api/", needToken(c.Token, api))
	mux.HandleFunc("GET /runbooks/{name}", func(w http.ResponseWriter, r *http.Request) { serveRunbook(w, r, c.Runbooks) })
	mux.Handle("/", http.FileServerFS(c.Page))
	return needLiteralHost(withHeaders(http.NewCrossOriginProtection().Handler(mux)))
}

func withHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// needLiteralHost refuses requests that name the server by DNS: a page of another site
// can have its own name resolve to this address (DNS rebinding), but not an IP address.
func needLiteralHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err != nil && host != "localhost" {
			http.Error(w, "name this server by its IP address or as localhost", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// needToken refuses requests without the token. It is in a header, which a browser never
// adds by itself, so another page cannot use it either.
func needToken(token string, next http.Handler) http.Handler {
	want := []byte("Bearer " + token)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			http.Error(w, "open the address that spillway ui printed: its end is the key to this page", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

var connectErrors = connect.NewErrorWriter()

// writeError writes an error as a caller of the API expects it.
func writeError(w http.ResponseWriter, r *http.Request, code connect.Code, message string) {
	err := connect.NewError(code, errors.New(message))
	if connectErrors.IsSupported(r) {
		_ = connectErrors.Write(w, r, err)
		return
	}
	http.Error(w, message, http.StatusBadGateway)
}

// nodeObject is a node in /api/nodes.
type nodeObject struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	// Flows is why events of flows do not arrive; "": they do, or nothing watches.
	Flows string `json:"flows"`
}

func writeNodes(w http.ResponseWriter, version string, nodes []*node) {
	object := struct {
		Version string       `json:"version"`
		Nodes   []nodeObject `json:"nodes"`
	}{Version: version}
	for _, n := range nodes {
		object.Nodes = append(object.Nodes, nodeObject{Name: n.Name, Address: n.Address, Flows: n.watchError()})
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object) // the caller has closed the connection
}

func serveRunbook(w http.ResponseWriter, r *http.Request, runbooks fs.FS) {
	text, err := fs.ReadFile(runbooks, r.PathValue("name")+".md")
	if err != nil {
		http.Error(w, "no such runbook", http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "text/markdown; charset=utf-8")
	_, _ = w.Write(text) // the caller has closed the connection
}
