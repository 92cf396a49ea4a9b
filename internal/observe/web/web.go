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
	"time"

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
	// DialTime limits a Dial; 0: 5 s.
	DialTime time.Duration
	// OneConnection sends all calls over one connection, by HTTP/2: each connection costs
	// the agent something.
	OneConnection bool
	// Explain says in sentences why a Dial failed; nil: Dial connects to a Unix socket.
	Explain func(error) string
}

// Config is what a Handler serves.
type Config struct {
	// Nodes are in the order in which the page shows them.
	Nodes []Node
	// Refresh returns the present nodes, each with a Name of its own, and what the list
	// lacks, as a sentence or "". It is called while a page is open. nil: they never change.
	Refresh func(context.Context) (nodes []Node, lacks string, err error)
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
	case len(c.Nodes) == 0 && c.Refresh == nil:
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
func Handler(c Config) http.Handler { return handler(c, newSet(c.Nodes, c.Refresh)) }

func handler(c Config, nodes *set) http.Handler {
	api := http.NewServeMux()
	api.HandleFunc("GET /api/nodes", func(w http.ResponseWriter, _ *http.Request) {
		nodes.relistIfOld()
		writeNodes(w, c.Version, nodes)
	})
	api.HandleFunc("POST /api/node/{id}/"+nodev1alpha1connect.NodeServiceName+"/{method}", func(w http.ResponseWriter, r *http.Request) {
		id, err := strconv.Atoi(r.PathValue("id"))
		n := nodes.node(id)
		if err != nil || n == nil {
			writeError(w, r, connect.CodeNotFound, "this node is no longer part of the cluster")
			return
		}
		http.StripPrefix("/api/node/"+r.PathValue("id"), n.proxy).ServeHTTP(w, r)
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
	// ID names the node in the address of calls. No other node gets it later.
	ID      int    `json:"id"`
	Name    string `json:"name"`
	Address string `json:"address"`
	// Flows is why events of flows do not arrive; "": they do, or nothing watches.
	Flows string `json:"flows"`
}

func writeNodes(w http.ResponseWriter, version string, s *set) {
	nodes, lacks, _ := s.now()
	object := struct {
		Version string `json:"version"`
		// Lacks is what the list lacks, or why it is old; "": nothing.
		Lacks string       `json:"lacks"`
		Nodes []nodeObject `json:"nodes"`
	}{Version: version, Lacks: lacks, Nodes: []nodeObject{}}
	for _, n := range nodes {
		own := n.own()
		object.Nodes = append(object.Nodes, nodeObject{ID: n.id, Name: own.Name, Address: own.Address, Flows: n.watchError()})
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
