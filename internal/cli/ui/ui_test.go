package ui

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
)

func program() cli.Program {
	return cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}}
}

func TestUsage(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, tt := range []struct {
		line, want string
		code       int
	}{
		{"--listen 0.0.0.0:8900", "--listen 0.0.0.0:8900: other machines reach this address: use 127.0.0.1, or also give --allow-remote",
			cli.ExitUsage},
		{"--listen 192.0.2.7:8900", "other machines reach this address", cli.ExitUsage},
		{"--listen [::]:0", "other machines reach this address", cli.ExitUsage},
		{"--listen localhost:0", "not an address and port", cli.ExitUsage},
		{"--listen 127.0.0.1", "not an address and port", cli.ExitUsage},
		{"--api-socket =/x", `--api-socket "=/x": not a socket: write PATH or NAME=PATH`, cli.ExitUsage},
		{"--api-socket x=", "not a socket", cli.ExitUsage},
		{"--listen " + taken.Addr().String(), "choose another address with --listen", cli.ExitFailed},
		{"now", "", cli.ExitUsage},
	} {
		var out, errs strings.Builder
		code := program().Run(append([]string{"ui"}, strings.Fields(tt.line)...), &out, &errs)
		if code != tt.code || !strings.Contains(errs.String(), tt.want) || strings.Count(errs.String(), "\n") != 1 || out.Len() > 0 {
			t.Errorf("%s: exit code %d, %q, %q", tt.line, code, &errs, &out)
		}
	}
}

func TestNamesOfSockets(t *testing.T) {
	nodes, err := (&options{sockets: []string{"/run/a.sock", "b=/run/b.sock", "/run/c=d.sock"}}).local(true)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nodes {
		got = append(got, n.Name+" "+n.Address)
	}
	if want := " /run/a.sock,b /run/b.sock, /run/c=d.sock"; strings.Join(got, ",") != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// The printed address leads to the page, whose token is the one in the address.
func TestThePrintedAddress(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	out, in := io.Pipe()
	cmd := NewCommand()
	cmd.SetArgs([]string{"--api-socket", "here=" + t.TempDir() + "/none.sock"})
	cmd.SetOut(in)
	cmd.SetErr(io.Discard)
	end := make(chan error, 1)
	go func() { end <- cmd.ExecuteContext(ctx) }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	address, err := url.Parse(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	token, found := strings.CutPrefix(address.Fragment, "token=")
	if !found || len(token) < 26 || address.Hostname() != "127.0.0.1" {
		t.Fatalf("printed %q", line)
	}
	read := func(path, token string) string {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address.Host+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+token)
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body)
	}
	if page := read("/", ""); !strings.Contains(page, `src="app.js"`) {
		t.Errorf("the page: %s", page)
	}
	if runbook := read("/runbooks/SpillwayDrops", ""); !strings.HasPrefix(runbook, "# SpillwayDrops") {
		t.Errorf("the runbook: %.100s", runbook)
	}
	if nodes := read("/api/nodes", token); !strings.Contains(nodes, `"name":"here"`) {
		t.Errorf("the nodes: %s", nodes)
	}
	if nodes := read("/api/nodes", "no"); strings.Contains(nodes, "here") {
		t.Errorf("the nodes without a token: %s", nodes)
	}
	stop()
	if err := <-end; err != nil {
		t.Error(err)
	}
}
